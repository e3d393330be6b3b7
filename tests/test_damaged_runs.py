"""Files of a run that are damaged: one line with the file and what to do, and no other result."""

import hashlib
import io
import shutil
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import error_of, start, write_data

from molflt.commands.cli import main
from molflt.files import save_tensors
from molflt.training.checkpoint import load_run, read_checkpoint, write_checkpoint
from molflt.training.config import read_config

WORDS = ["--trainer.max_steps=3", "--trainer.val_every=2", "--trainer.log_every=1"]
WORDS += ["--task.warmup_steps=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    data = write_data(folder / "data", 9, 5)
    assert start(data, folder / "run", *WORDS) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def refuses(path, read) -> str:
    """The message that names the file, short and of one line, or "" if it was read."""
    try:
        read()
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
        assert text.startswith(str(path)) and "\n" not in text, text
        assert len(text) < len(str(path)) + 500
        return text
    return ""


def test_a_written_configuration_is_read_as_it_was_used(run):
    assert (
        read_config(run) == read_checkpoint(run / "checkpoints" / "last.ckpt")["molflt"]["config"]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected `key: value`; got None"),
        (b"[1, 2]", "expected `key: value`; got [1, 2]"),
        (b"model: {dim: 16\n", "line 2: not YAML"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b"[" * 20_000, "too many brackets"),
        (b"a: &a [1]\nmodel: *a", "references"),
        (b"seed: 0\nmodel: {dim: 8}\nseed: 1", "key 'seed' in lines 1 and 3; expected it once"),
        (b"seed: " + b"9" * 5_000, "not YAML"),
        (b"x" * 2_000_000, "at most 1,000,000 bytes; got 2,000,000"),
        (b"!!python/object/apply:os.system [ls]", "not YAML"),
    ],
)
def test_what_is_no_configuration_is_refused(run, capsys, content, message):
    path = run / "config.yaml"
    path.write_bytes(content)
    for command in (["evaluate", str(run)], ["train", "--resume", str(run)]):
        line = error_of(capsys, *command)
        assert line.startswith(str(path)) and message in line and len(line) < 500


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "dim: 16",
            "dim: abc",
            "Parser key \"model.dim\": Expected a <class 'int'>. Got value: abc",
        ),
        ("dim: 16", "dim: null", "key model.dim: expected a value; got none"),
        ("  dim: 16", "  dmi: 16", "Group 'model' does not accept option 'dmi'"),
        ("  dim: 16", "  dim: 24", "model.dim is 24, but best.safetensors was trained with 16"),
        ("\nmodel:", "\nmodel: []\nother:", "key model: expected its options; got []"),
        ("\ntask:", "\ntsak:", "key task: expected its options; got no such key"),
        ("recipe: is2re", "recipe: []", "recipe []; expected one of is2re, "),
        ("recipe: is2re", "recipe: sounds", "recipe 'sounds'; expected one of is2re, "),
        ("recipe: is2re", "recipe: images", "does not accept option"),
        ("seed: 0", "1: 0", "; restore the file that training wrote"),
    ],
)
def test_a_wrong_key_is_named(run, capsys, old, new, message):
    path = run / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    line = error_of(capsys, "evaluate", str(run))
    assert line.startswith(str(path)) and message in line


def test_random_damage_of_a_configuration_ends_in_one_line(run):
    draw, path = np.random.default_rng(0), run / "config.yaml"
    whole, refused = path.read_bytes(), 0
    for _ in range(25):
        content = bytearray(whole)
        if draw.random() < 0.2:
            del content[draw.integers(len(content)) :]
        for place in draw.integers(len(content) or 1, size=3) if content else ():
            content[place] = draw.integers(256)
        path.write_bytes(content)
        refused += refuses(run, lambda: load_run(run)) != ""
    assert refused > 15


def test_every_changed_byte_of_a_checkpoint_is_refused(run):
    path = run / "checkpoints" / "last.ckpt"
    whole = path.read_bytes()
    places = np.random.default_rng(0).integers(len(whole), size=100)
    for place in [*places, len(whole) - 1, len(whole) - 71, len(whole) - 73]:
        content = bytearray(whole)
        content[place] ^= 1
        path.write_bytes(content)
        assert "damaged since it was written" in refuses(path, lambda: read_checkpoint(path)) or (
            place in range(len(whole) - 73, len(whole) - 64)  # the digest's own frame
            and refuses(path, lambda: read_checkpoint(path))
        )
    for end in (0, 1, 100, 5_000, len(whole) - 71, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert refuses(path, lambda: read_checkpoint(path))


def test_a_checkpoint_is_what_torch_writes_with_a_digest_behind_it(tmp_path):
    """torch reads it as ever; the digest is that of all before it."""
    path = tmp_path / "last.ckpt"
    write_checkpoint(path, {"a": torch.arange(3)})
    content = path.read_bytes()
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.arange(3))
    assert content[-64:].decode() == hashlib.sha256(content[:-71]).hexdigest()


def remove(name):
    def change(state):
        del state[name]
        return state

    return change


def reshape(state):
    name = next(name for name in state["state_dict"] if name.endswith("mlp.0.weight"))
    state["state_dict"][name] = torch.zeros(3)
    return state


def spoil(state):
    name = next(name for name in state["state_dict"] if name.endswith("mlp.0.weight"))
    state["state_dict"][name][0] = float("nan")
    return state


def rename_state(state):
    state["optimizer_states"] = [{"param_groups": [], "state": {}}]
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: [1], "expected 'callbacks', a dict; got none"),
        (lambda state: {}, "expected 'callbacks', a dict; got none"),
        (remove("callbacks"), "expected 'callbacks', a dict; got none"),
        (remove("loops"), "expected 'loops', a dict; got none"),
        (remove("state_dict"), "expected 'state_dict', a dict; got none"),
        (remove("optimizer_states"), "expected 'optimizer_states', a list; got none"),
        (remove("pytorch-lightning_version"), "a str; got none"),
        (lambda state: {**state, "global_step": "3"}, "'global_step', a int; got str"),
        (lambda state: {**state, "loops": {}}, "the state in it does not fit this run; KeyError"),
        (rename_state, "the state in it does not fit this run; ValueError: loaded state dict"),
        (reshape, "mlp.0.weight': the model of config.yaml expects (16, 16); got (3,)"),
        (spoil, "mlp.0.weight': expected finite numbers; got NaN or infinity"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(run, capsys, change, message):
    path = run / "checkpoints" / "last.ckpt"
    write_checkpoint(path, change(torch.load(path, weights_only=True)))
    more = ["--trainer.max_steps", "4"]  # else there is no step to restore for
    line = error_of(capsys, "train", "--resume", str(run), *more)
    assert line.startswith(str(path)) and message in line, line


@pytest.mark.parametrize("times", [1, 40], ids=["packed", "overlapping"])
def test_a_checkpoint_that_unpacks_to_more_than_its_size_is_refused(times, tmp_path):
    """Zeros that deflate hides; and one part of the file under many names."""
    buffer, path = io.BytesIO(), tmp_path / "last.ckpt"
    torch.save({"a": torch.zeros(20_000_000 // times)}, buffer)
    kind = zipfile.ZIP_DEFLATED if times == 1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer) as whole, zipfile.ZipFile(path, "w", kind) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
        packed.filelist += (times - 1) * packed.filelist
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"last\.ckpt: not a complete .*unpacks to \d"):
            read_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * path.stat().st_size + 1_000_000
    finally:
        tracemalloc.stop()


def test_a_checkpoint_that_has_lost_its_digest_is_refused(run):
    path = run / "checkpoints" / "last.ckpt"
    buffer = io.BytesIO()
    torch.save(torch.load(path, weights_only=True), buffer)
    path.write_bytes(buffer.getvalue())
    assert "its sha256 is missing" in refuses(path, lambda: read_checkpoint(path))


def test_every_changed_byte_of_weights_is_refused(run):
    path = run / "checkpoints" / "best.safetensors"
    whole = path.read_bytes()
    for place in np.random.default_rng(0).integers(len(whole), size=8):
        content = bytearray(whole)
        content[place] ^= 16
        path.write_bytes(content)
        assert refuses(path, lambda: load_run(run))
    at = whole.index(b'"sha256"')
    path.write_bytes(whole[: at + 2] + b"i" + whole[at + 3 :])  # not even its name
    assert "its sha256 is missing" in refuses(path, lambda: load_run(run))


def test_damaged_weights_are_noticed_on_resuming(run, capsys):
    path = run / "checkpoints" / "best.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    line = error_of(capsys, "train", "--resume", str(run))
    assert line.startswith(f"{path}: damaged since it was written; expected sha256 '")


@pytest.mark.parametrize("options", ["", "[1]", "{", "[" * 5000])
def test_options_in_a_header_are_an_object(run, options):
    path = run / "checkpoints" / "best.safetensors"
    save_tensors(path, load_file(path), {"model": options})
    assert "key 'model' of its header must be an object" in refuses(path, lambda: load_run(run))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_named(run, value):
    path = run / "checkpoints" / "best.safetensors"
    weights = load_file(path)
    name = next(name for name, tensor in weights.items() if tensor.is_floating_point())
    weights[name].view(-1)[0] = value
    save_file(weights, path)
    message = refuses(path, lambda: load_run(run))
    assert f"key {name!r}: expected finite numbers; got NaN or infinity" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("\n1,", "\nabc,"), "expected a row of step 'abc'"),
        (lambda text: text.replace("\n1,", "\n1,1,"), "expected a row of step '1'"),
        (lambda text: text.replace("lr", "rl", 1), "expected the columns step,lr,train_loss"),
        (lambda text: text.replace("\n1,", "\n\0,"), ""),
        (lambda text: text + "\udcff\n", "can't decode byte 0xff"),
        (lambda text: text.replace("\n1,", '\n1,"'), ""),
    ],
)
def test_a_garbled_table_is_named(run, capsys, change, message):
    path = run / "metrics.csv"
    text = change(path.read_text())
    path.write_bytes(text.encode(errors="surrogateescape"))
    line = error_of(capsys, "train", "--resume", str(run), "--trainer.max_steps", "4")
    assert line.startswith(str(path)) and message in line
    assert "restore the table, or move it away" in line


def test_a_row_that_was_being_written_is_dropped(run):
    """It would count as another step: 1 of 16."""
    path = run / "metrics.csv"
    rows = path.read_text()
    path.write_text(rows + "1")
    assert main(["train", "--resume", str(run), "--trainer.max_steps", "4"]) == 0
    assert path.read_text().startswith(rows)
    assert [row.split(",")[0] for row in path.read_text().splitlines()[-2:]] == ["4", "4"]


@pytest.mark.parametrize("number", [float("nan"), 1e300, 10**400])
@pytest.mark.parametrize("key", ["lr", "betas"])
def test_numbers_of_an_optimizer_that_no_step_can_be_taken_with(run, number, key, capsys):
    """Of a checkpoint whose digest is right: nobody but its writer can have done this."""
    path = run / "checkpoints" / "last.ckpt"
    checkpoint = read_checkpoint(path)
    checkpoint["optimizer_states"][0]["param_groups"][0][key] = number
    write_checkpoint(path, checkpoint)
    line = error_of(capsys, "train", "--resume", str(run), "--trainer.max_steps=9")
    assert f"optimizer_states.0.param_groups.0.{key}: expected finite numbers" in line.replace(
        "'", ""
    )
