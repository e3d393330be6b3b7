"""Transfer of trained weights between attention mechanisms."""

from torch import nn

from molflt.attention.layer import Scaling


def convert_weights_(source: nn.Module, target: nn.Module) -> list[str]:
    """Copies the parameters that two models share, such as a softmax model and a kernelized model.

    The projections of queries, keys, values and outputs have the same meaning in every mechanism.
    FAVOR (arXiv:2006.03555, section 4.2) and NPRF (arXiv:2106.12566, section 4.5) convert models in
    the same way. With the feature map "polynomial", outputs differ by at most 1 % from those of
    softmax layers that have normalized queries and keys and a temperature of about 1. Models with
    other feature maps or sharper attention need further training.

    Returns the names of the target's parameters that the source does not have. These parameters are
    not changed.

    Args:
        source: any module.
        target: module of the same architecture with a different attention mechanism, modified in
            place. The target keeps its random projections if the source does not have any.
    """
    _refuse_other_logits(source, target)
    given = source.state_dict()
    own = target.state_dict()
    shared = given.keys() & own.keys()
    parameters = {name for name, _ in target.named_parameters()}
    if not parameters.intersection(shared):
        raise ValueError(
            f"{type(source).__name__} and {type(target).__name__} do not share a parameter"
        )
    for name in shared:  # before anything is copied
        if given[name].shape != own[name].shape:
            shapes = f"{tuple(given[name].shape)} in the source, {tuple(own[name].shape)}"
            raise ValueError(f"{name}: {shapes} in the target")
    target.load_state_dict({name: given[name] for name in shared}, strict=False)
    return sorted(parameters.difference(shared))


def _refuse_other_logits(source: nn.Module, target: nn.Module) -> None:
    modules = dict(source.named_modules())
    for name, own in target.named_modules():
        given = modules.get(name)
        if not isinstance(own, Scaling) or not isinstance(given, Scaling):
            continue
        for option in ("heads", "normalize"):
            here, there = getattr(own, option), getattr(given, option)
            if here != there:
                raise ValueError(f"{name}: {option}={there} in the source, {here} in the target")
        if given.log_temperature is not None and own.log_temperature is None:
            raise ValueError(f"{name} of the source has a temperature; set learn_temperature=True")
