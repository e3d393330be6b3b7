"""Transfer of trained weights between attention mechanisms."""

from torch import nn

from molflt.attention.layer import Scaling


def convert_weights_(source: nn.Module, target: nn.Module) -> list[str]:
    """Copies the parameters that two models share, such as a softmax model and a kernelized model.

    The projections of queries, keys, values and outputs have the same meaning in every mechanism.
    FAVOR (arXiv:2006.03555, section 4.2) and NPRF (arXiv:2106.12566, section 4.5) convert models in
    the same way. With the feature map "polynomial", outputs differ by 1.1 % (heads of dimension 8)
    or less (wider heads) from those of softmax layers that have normalized queries and keys and a
    temperature of about 1. Other maps and sharper attention need further training.

    Returns the names of the target's parameters that the source lacks; they are not changed.

    Args:
        source: any module.
        target: module of the same architecture with a different attention mechanism, modified in
            place. The target keeps its random projections if the source does not have any.
    """
    modules = dict(source.named_modules())
    for name, ours in target.named_modules():  # layers whose logits would differ
        theirs = modules.get(name)
        if not isinstance(ours, Scaling) or not isinstance(theirs, Scaling):
            continue
        for option, own in {"heads": "heads", "normalize_qk": "normalize"}.items():
            old, new = getattr(theirs, own), getattr(ours, own)
            if old != new:
                raise ValueError(f"{name}: {option}={old} in the source, {new} in the target")
        if theirs.log_temperature is not None and ours.log_temperature is None:
            raise ValueError(f"{name} of the source has a temperature; set learn_temperature=True")
    source_weights, target_weights = source.state_dict(), target.state_dict()
    shared = source_weights.keys() & target_weights.keys()
    parameters = {name for name, _ in target.named_parameters()}
    if not parameters.intersection(shared):
        raise ValueError(
            f"{type(source).__name__} and {type(target).__name__} do not share a parameter"
        )
    target.load_state_dict({name: source_weights[name] for name in shared}, strict=False)
    return sorted(parameters.difference(shared))
