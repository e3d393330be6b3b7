"""Files that would run code, or write outside of their folder, if anything in them were obeyed."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzzing.cases import Case, Format
from fuzzing.media import unpacking
from fuzzing.pickles import BOMBS, programs, wide_tensor
from fuzzing.runs import sealed, zipped
from fuzzing.seeds import INNER, MODEL, STEPS, STEPWISE, old_layout
from fuzzing.structures import in_lmdb, reading

Plant = Callable[[Random, Path, Path], Case]


def canary_of(folder: Path) -> Path:
    """The file that appears beside the folder of an input if its code is run."""
    return folder.with_name(f"{folder.name}.canary")


def _in_record(draw: Random, folder: Path, seeds: Path) -> Case:
    """A program in place of a record, of one of its values, or of the length."""
    name, program = draw.choice(sorted(programs(canary_of(folder)).items()))
    records = [(seeds / "records" / f"old-{i}").read_bytes() for i in range(3)]
    return _placed(draw, folder, seeds, records, name, program)


def _bomb(draw: Random, folder: Path, seeds: Path) -> Case:
    """A small record that asks for much time or memory."""
    name, program = draw.choice(sorted(BOMBS.items()))
    if draw.random() < 0.15:
        rows = draw.choice((10**5, 4 * 10**8, 2**40, 2**50))
        program = wide_tensor(rows, lambda value: pickle.dumps(value, 3)[2:-1])
        name = f"a row {rows} times"
    records = [(seeds / "records" / f"old-{i}").read_bytes() for i in range(3)]
    return _placed(draw, folder, seeds, records, name, program)


def _placed(
    draw: Random, folder: Path, seeds: Path, records: list[bytes], name: str, program: bytes
) -> Case:
    length: bytes | None = b""
    where = draw.choice(("record", "value", "value", "key", "behind", "length"))
    field = pickle.dumps("pos", 3)[2:-1]
    if where == "record":
        records[1] = b"\x80\x04" + program + b"."
    elif where == "value":
        records[1] = old_layout(b"}" + field + program + b"s")
    elif where == "key":
        records[1] = old_layout(b"}" + program + field + b"s")
    elif where == "behind":
        records[1] = records[1][:-1] + program + b"."
    else:
        length = b"\x80\x04" + program + b"."
    return in_lmdb(draw, folder, seeds, records, f"{name} as {where}", length, truth=None)


def _in_checkpoint(draw: Random, folder: Path, seeds: Path) -> Case:
    """A program in last.ckpt, as an archive, as torch's older format, or as a bare pickle."""
    import zipfile

    run = shutil.copytree(seeds / "run", folder / "run")
    file = run / "checkpoints" / "last.ckpt"
    name, program = draw.choice(sorted(programs(canary_of(folder)).items()))
    how = draw.choice(
        ("archive", "archive, comment kept", "archive, sealed", "archive, sealed", "pickle", "old")
    )
    program = b"\x80\x02" + program + b"."
    if how.startswith("archive"):
        with zipfile.ZipFile(file) as archive:
            members = {info.filename: archive.read(info) for info in archive.infolist()}
            comment = archive.comment if "kept" in how else b""
        pickled = next(member for member in members if member.endswith("data.pkl"))
        content = zipped(members | {pickled: program}, comment)
        file.write_bytes(sealed(content) if "sealed" in how else content)
    else:
        magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
        magic += pickle.dumps({"protocol_version": 1001, "little_endian": True}, 2)
        file.write_bytes((magic if how == "old" else b"") + program)
    words = ["train", "--resume", "run", f"--trainer.max_steps={STEPS + 1}"]
    return Case(words, (file.name,), file.stat().st_size, f"{name}, {how}")


def _as_weights(draw: Random, folder: Path, seeds: Path) -> Case:
    """A program under the name of weights."""
    name, program = draw.choice(sorted(programs(canary_of(folder)).items()))
    file = folder / draw.choice(("weights.safetensors", "weights.pt", "weights.ckpt"))
    file.write_bytes(b"\x80\x02" + program + b".")
    words = ["predict", str(seeds / "run"), str(seeds / "data/val_id.safetensors")]
    words += ["--out=out/energies.csv", f"--checkpoint={file.name}", "--device=cpu"]
    return Case(words, (file.name,), file.stat().st_size, name)


def _in_yaml(draw: Random, folder: Path, seeds: Path) -> Case:
    """Tags and names of classes in a configuration."""
    canary = str(canary_of(folder))
    kind = draw.choice(("run", "lm", "img"))
    text = (seeds / kind / "config.yaml").read_text()
    tag = draw.choice((
        f"!!python/object/apply:os.system ['touch {canary}']",
        f"!!python/object/apply:subprocess.Popen [['touch', '{canary}']]",
        f"!!python/object/new:subprocess.Popen [['touch', '{canary}']]",
        f"!!python/object/apply:builtins.eval [\"open('{canary}', 'w')\"]",
        "!!python/name:os.system", "!!python/module:antigravity", "!!python/object:os.system {}",
        f"{{_target_: os.system, _args_: ['touch {canary}']}}",
        f"{{class_path: subprocess.Popen, init_args: {{args: [touch, '{canary}']}}}}",
        "{class_path: molflt.graph.EnergyRegressor, init_args: {}}",
        f"${{oc.env:{canary}}}", f"$(touch {canary})", f"`touch {canary}`", f"| touch {canary}",
        f"__import__('os').system('touch {canary}')",
    ))  # fmt: skip
    lines = text.splitlines()
    at = draw.choice([i for i, line in enumerate(lines) if ": " in line])
    lines[at] = f"{lines[at].partition(': ')[0]}: {tag}"
    run = folder / kind
    if draw.random() < 0.5:
        shutil.copytree(seeds / kind, run)
        file = run / "config.yaml"
        words = ["evaluate", kind, "--out=out", "--device=cpu"]
        if kind == "run":
            words += ["--splits", "val_id"]
        elif draw.random() < 0.5:
            words = ["train", "--resume", kind, f"--trainer.max_steps={STEPS + 1}"]
    else:
        file = folder / "train.yaml"
        words = ["train", "--config", file.name, "--run=out/run"]
    file.write_text("\n".join(lines) + "\n")
    key = lines[at].partition(":")[0].strip()
    names = (file.name, key, "recipe", "_target_", f"{canary}")
    return Case(words, names, None, f"{kind}: {tag[:60]} as {key}")


def _in_option(draw: Random, folder: Path, seeds: Path) -> Case:
    """Code as the value of an option, or in a data set with a script."""
    canary = str(canary_of(folder))
    script = folder / "evil" / "evil.py"
    script.parent.mkdir()
    script.write_text(f"open({canary!r}, 'w')\n")
    (folder / "evil.py").write_text(f"open({canary!r}, 'w')\n")
    text = [*MODEL, *STEPWISE, "--recipe=language", "--run=out/run", "--data.val_fraction=0.5"]
    words = draw.choice((
        ["train", *text, "--data.train=evil.py"],
        ["train", *MODEL, "--run=out/run", "--model={class_path: os.system}"],
        ["train", *MODEL, "--run=out/run", "--model.position_options=!!python/name:os.system"],
        ["train", "--run=out/run", "--recipe=evil", "--data.root=evil"],
        ["train", "--run=out/run", "--recipe=evil:load", "--data.root=evil"],
        ["train", "--config=evil.py", "--run=out/run"],
        ["data", "inspect", "evil.py"],
        ["data", "inspect", "evil"],
        ["data", "convert", "evil.py", "out/store.safetensors"],
        ["predict", "evil", str(seeds / "data/val_id.safetensors"), "--out=out/energies.csv"],
        ["generate", "evil"],
    ))  # fmt: skip
    names = ("evil", "model", "position_options", "recipe", "data.")
    return Case(
        words, names, 100, " ".join(word for word in words if "evil" in word or "os." in word)
    )


def _in_ase(draw: Random, folder: Path, seeds: Path) -> Case:
    """Objects in ASE's JSON, trajectories and databases; object arrays; code in headers."""
    canary = str(canary_of(folder))
    tree = json.loads((seeds / "ase" / "seed.json").read_text())
    row = tree["1"] if "1" in tree else next(iter(tree.values()))
    evil: object = draw.choice((
        {"__class__": "os.system", "args": [f"touch {canary}"]},
        {"__ase_objtype__": "cell", "array": {"__ndarray__": [[3, 3], "object", [0] * 9]}},
        {"__ndarray__": [[2**40], "float64", []]},
        {"__ndarray__": [[1], "O", ["x"]]},
        {"__complex__": ["x", "y"]},
        {"__ase_objtype__": "os.system"},
        [{"name": "FixAtoms", "kwargs": {"indices": [2**40]}}],
        [{"name": "os.system", "kwargs": {"command": f"touch {canary}"}}],
        [{"name": "ExternalForce", "kwargs": {"a1": 0, "a2": 1, "f_ext": 1}}],
        {"name": "os.system"},
    ))  # fmt: skip
    key = draw.choice(sorted([*row, "constraints", "calculator", "calculator_parameters", "data"]))
    how = draw.choice(("json", "json", "traj", "extxyz", "cif", "npy"))
    file = folder / f"input.{'traj' if how == 'npy' else how}"
    what = f"{how} {key}"
    if how == "json":
        row[key] = evil
        file.write_text(json.dumps(tree))
    elif how == "traj":
        content = (seeds / "ase" / "seed.traj").read_bytes()
        text = json.dumps(evil).encode()
        at = content.find(b'{"version')
        at = at if at > 0 else content.find(b"{")
        file.write_bytes(content[:at] + text + content[at + len(text) :])
    elif how == "npy":  # a pickle where arrays are expected
        file.write_bytes(b"\x80\x02" + programs(Path(canary))["reduce os.system"] + b".")
    else:
        content = (seeds / "ase" / f"seed.{how}").read_bytes()
        header = f"x=__import__('os').system('touch {canary}') {json.dumps(evil)} ".encode()
        lines = content.splitlines(keepends=True)
        lines[1] = header + lines[1]
        file.write_bytes(b"".join(lines))
    return reading(draw, file, seeds, what, None)


def _links(draw: Random, folder: Path, seeds: Path) -> Case:
    """Members of an archive that lead out of it, that link, that come twice, that are devices."""
    data = (seeds / "seed.lmdb").read_bytes()
    canary = canary_of(folder)
    up = "../" * 3 + canary.name
    name = f"{INNER}/all/val_id/data.lmdb"
    plain = (name, tarfile.REGTYPE, "")
    members: list[tuple[str, bytes, str]] = draw.choice((
        [(f"{INNER}/all/val_id/{up}", tarfile.REGTYPE, ""), plain],
        [(f"{INNER}/all/val_id/../../../../{up}", tarfile.REGTYPE, ""), plain],
        [(str(canary), tarfile.REGTYPE, ""), plain],
        [(name, tarfile.SYMTYPE, str(canary)), plain],
        [(name, tarfile.LNKTYPE, str(canary)), plain],
        [(f"{INNER}/all/val_id", tarfile.SYMTYPE, str(canary.parent)), plain],
        [(INNER, tarfile.SYMTYPE, str(canary.parent)), plain],
        [(name, tarfile.CHRTYPE, "")], [(name, tarfile.FIFOTYPE, "")],
        [(name, tarfile.DIRTYPE, "")],
        [plain, plain], [plain, (f"./{name}", tarfile.REGTYPE, "")],
        [plain, (f"{INNER}/all/val_id/more.txt", tarfile.REGTYPE, "")],
        [(f"{INNER}/all/val_id/\x1b[31m", tarfile.REGTYPE, "")],
        [(f"{INNER}/all/val_id/" + "d/" * 200 + "x", tarfile.REGTYPE, ""), plain],
        [(f"{INNER}//all/val_id//data.lmdb", tarfile.REGTYPE, "")],
    ))  # fmt: skip
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for index, (path, kind, link) in enumerate(members):
            info = tarfile.TarInfo(path)
            content = data if index == 0 else data[::-1]
            info.type, info.linkname, info.mode = kind, link, draw.choice((0o644, 0o4777, 0))
            info.size = len(content) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(content))
    packed = gzip.compress(buffer.getvalue(), 1, mtime=0)
    return unpacking(folder, packed, f"{members[0][0][-30:]!r} type {members[0][1]!r}", check=False)


def _huge(draw: Random, folder: Path, seeds: Path) -> Case:
    """Small files of structures that ask for much: far atoms, tiny cells, counts that lie."""
    count = draw.choice((2, 2, 999999999999, -1, 0))
    far = draw.choice(("1", "1e3", "1e4", "1e5", "1e6", "1e10", "1e20", "1e30", "1e38", "1e300"))
    side = draw.choice(("0.02", "0.3", "0.6", "5", "1e4", "1e6", "1e30"))
    columns = draw.choice(("", "", ":x:R:999999999", ":x:R:-1", ":x:R:0", ":tags:I:1", ":x:O:1"))
    pbc = draw.choice(("F F F", "T T T", "T T F"))
    lattice = f'Lattice="{side} 0 0 0 {side} 0 0 0 {side}" ' if draw.random() < 0.7 else ""
    tail = " 1" if columns else ""
    lines = [str(count), f'{lattice}Properties=species:S:1:pos:R:3{columns} pbc="{pbc}"']
    lines += [f"Cu 0 0 0{tail}", f"Cu {far} 0 0{tail}"]
    file = folder / "input.extxyz"
    file.write_text("\n".join(lines) + "\n")
    return reading(draw, file, seeds, f"{count} atoms at {far}, cell {side}, {pbc} {columns}", None)


def _misplaced(draw: Random, folder: Path, seeds: Path) -> Case:
    """A file, link, pipe or folder where another kind of thing is expected."""
    store, what = seeds / "data" / "val_id.safetensors", draw.choice(("loop", "folder", "ending"))
    ending = draw.choice((".lmdb", ".safetensors", ".extxyz", ".traj", ".db", ".json", ".cif"))
    file = folder / f"input{ending}"
    if what == "loop":
        os.symlink(file, file)
    elif what == "folder":
        file.mkdir()
        shutil.copy(store, file / "data.lmdb")
    else:
        every = [path for path in seeds.rglob("*") if path.is_file() and path.suffix != ending]
        shutil.copy(draw.choice(sorted(every)), file)
    size = 10**6 if what != "ending" else file.stat().st_size
    case = reading(draw, file, seeds, what, None) if what == "ending" else None
    words = ["data", "inspect", file.name]
    return case or Case(words, (file.name,), size, f"{what}{ending}")


FORMATS = {
    "code-record": Format(_in_record, 5),
    "code-checkpoint": Format(_in_checkpoint, 1.5, trains=True),
    "code-weights": Format(_as_weights, 1),
    "code-yaml": Format(_in_yaml, 1.5, trains=True),
    "code-option": Format(_in_option, 0.7, trains=True),
    "code-ase": Format(_in_ase, 2),
    "code-archive": Format(_links, 1.5),
    "bomb-record": Format(_bomb, 3),
    "bomb-extxyz": Format(_huge, 3),
    "misplaced": Format(_misplaced, 2),
}
