"""Data for the pass explorer, of the size and shape that a transformer of many blocks gives."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Line = list[Any]  # text, module, unit, kind, gathered, live, start, end
Diff = list[list[str]]

BLOCK_NUMEL = 855_654_400
BLOCK_BYTES = 2 * BLOCK_NUMEL
EMBEDDING_NUMEL = 1_050_673_152
SAVED_BYTES = 300 * 2**20
AT_REST_BYTES = 90 * 10**9
GATHER_US, SCATTER_US, REDUCE_US = 3900.0, 4100.0, 800.0
SHARD, REPLICAS = 8, 2

PARAMETERS = {
    "attention.wq": [8192, 8192],
    "attention.wk": [1024, 8192],
    "attention.wv": [1024, 8192],
    "attention.wo": [8192, 8192],
    "feed_forward.w1": [28672, 8192],
    "feed_forward.w2": [8192, 28672],
    "feed_forward.w3": [28672, 8192],
    "attention_norm": [8192],
    "ffn_norm": [8192],
}
MODULES = ["attention_norm", "attention.wq", "attention.wk", "attention", "feed_forward.w1"]
OPERATORS = ["mm", "mul", "view", "add", "_to_copy", "view", "silu", "transpose"]
FORWARD_LINES, BACKWARD_LINES = 100, 125  # a block

PASSES = [
    "partition",
    "group{blocks=1}",
    "replicate{axis=replicate}",
    "precision{param=bfloat16, reduce=float32}",
    "persist{below=8192}",
    "reshard{after_forward=True}",
    "order_waits",
    "prefetch{units=1}",
    "limit{live_bytes=8GiB}",
    "delay_scatters",
    "sink_views",
    "verify_schedule",
]


@dataclass
class Clock:
    """Where the two streams of a rank have got to, in microseconds, and what is alive."""

    compute: float = 0.0
    network: float = 0.0
    saved_bytes: int = 0
    gathered: set[str] = field(default_factory=set)
    lines: list[Line] = field(default_factory=list)

    def add(self, text: str, module: str, unit: str, kind: str, us: float = 0.0) -> None:
        start, end = self.compute, self.compute + us
        if kind in ("gather", "scatter", "reduce"):
            start = max(self.compute, self.network)
            end = self.network = start + us
        else:
            self.compute = end
        gathered = len(self.gathered) * BLOCK_BYTES
        live = AT_REST_BYTES + gathered + self.saved_bytes
        self.lines.append([text, module, unit, kind, gathered, live, start, end])

    def arrive(self, unit: str, text: str, at: float) -> None:
        """A wait for what arrives at `at`."""
        self.add(text, unit, unit, "wait", max(0.0, at - self.compute))


def model(blocks: int = 80) -> dict[str, Any]:
    """All data of a Llama of `blocks` blocks over shard=8, replicate=2."""
    names = [f"layers.{i}" for i in range(blocks)]
    forward, backward = list(_forward(names)), list(_backward(names))
    return {
        "title": f"Llama, {blocks} blocks, over shard={SHARD} replicate={REPLICAS}",
        "plan": {
            "passes": PASSES,
            "axes": [{"name": "shard", "ranks": SHARD}, {"name": "replicate", "ranks": REPLICAS}],
            "facts": [
                ["reshard after forward", "True"],
                ["prefetch", "1 forward, 1 backward"],
                ["gathered bytes allowed", "8 GiB"],
                ["inputs cast to", "bfloat16"],
                ["outputs cast to", "float32"],
                ["parameters", f"{blocks * BLOCK_NUMEL + 2 * EMBEDDING_NUMEL:,}"],
            ],
            "units": _units(names),
        },
        "collectives": list(_collectives(names)),
        "memory": _memory(blocks),
        "assumptions": "Times are estimated from shapes at 400 TFLOP/s, 2 TB/s and 350 GB/s "
        "between ranks; nothing was measured.",
        "programs": [
            {"name": "forward", "stage": "forward", "lines": forward},
            {"name": "backward", "stage": "backward", "lines": backward},
        ],
        "passes": list(_passes(names, forward, backward)),
    }


def empty() -> dict[str, Any]:
    """What there is to show before any graph was captured."""
    return {
        "title": "Nothing yet",
        "plan": {"passes": ["partition"], "axes": [], "facts": [], "units": []},
        "collectives": [],
        "memory": {"rows": [], "peak_bytes": 0, "peak_stage": "", "peak_node": ""},
        "assumptions": "",
        "programs": [],
        "passes": [],
    }


def hostile(name: str) -> dict[str, Any]:
    """A small model where everything that has a name is called `name`."""
    data = model(blocks=2)
    data["title"] = name
    data["plan"]["passes"] = [name]
    data["plan"]["facts"] = [[name, name]]
    data["plan"]["units"][1]["name"] = name
    data["plan"]["units"][1]["parameters"][0]["name"] = name
    data["memory"]["rows"][0][0] = name
    data["assumptions"] = name
    data["collectives"][0]["unit"] = name
    data["programs"][0]["name"] = name
    data["programs"][0]["lines"][0][:3] = [name, name, name]
    entry = {"name": name, "stage": "forward", "program": name, "added": 1, "removed": 0}
    data["passes"] = [{**entry, "moved": 0, "diff": [["@", name], ["+", name]]}]
    return data


def _units(names: list[str]) -> list[dict[str, Any]]:
    def unit(name: str, shapes: dict[str, list[int]]) -> dict[str, Any]:
        parameters = [
            {
                "name": f"{name}.{key}",
                "shape": shape,
                "numel": shape[0] * (shape[1] if len(shape) > 1 else 1),
                "dtypes": "float32/bfloat16/float32",
                "traits": "persistent" if len(shape) == 1 else "",
            }
            for key, shape in shapes.items()
        ]
        numel = sum(parameter["numel"] for parameter in parameters)
        return {
            "name": name,
            "numel": numel,
            "shard_bytes": 4 * numel // SHARD,
            "gathered_bytes": 2 * numel,
            "parameters": parameters,
        }

    return [
        unit("tok_embeddings", {"weight": [128256, 8192]}),
        *(unit(name, PARAMETERS) for name in names),
        unit("norm..output", {"norm.weight": [8192], "output.weight": [128256, 8192]}),
    ]


def _collectives(names: list[str]) -> Iterator[dict[str, Any]]:
    sent = BLOCK_BYTES * (SHARD - 1) // SHARD
    kinds = [
        ("forward", "all-gather", "shard", sent),
        ("backward", "all-gather", "shard", sent),
        ("backward", "reduce-scatter", "shard", 2 * sent),
        ("backward", "all-reduce", "replicate", 4 * BLOCK_NUMEL // SHARD),
    ]
    for unit in ["tok_embeddings", *names, "norm..output"]:
        for stage, kind, axis, size in kinds:
            yield {
                "unit": unit,
                "stage": stage,
                "kind": kind,
                "axis": axis,
                "count": 1,
                "bytes": size,
            }


def _memory(blocks: int) -> dict[str, Any]:
    rows = [
        ["parameters", 4 * blocks * BLOCK_NUMEL // SHARD],
        ["gradients", 4 * blocks * BLOCK_NUMEL // SHARD],
        ["optimizer states", 8 * blocks * BLOCK_NUMEL // SHARD],
        ["gathered", 2 * BLOCK_BYTES],
        ["saved activations", blocks * SAVED_BYTES],
        ["temporaries", 3 * 2**30],
    ]
    later = ["gradients after backward", 4 * blocks * BLOCK_NUMEL // SHARD]
    return {
        "rows": [*rows, later],
        "peak_bytes": sum(size for _, size in rows),
        "peak_stage": "backward",
        "peak_node": f"mm_layers_{blocks - 1}_16",
    }


def _forward(names: list[str]) -> Iterator[Line]:
    clock = Clock()
    clock.add("primals_1: i64[1, 8192] = input()", "", "", "input")
    arrival = _gather(clock, names[0])
    for name, following in zip(names, [*names[1:], ""], strict=True):
        arrived, arrival = arrival, _gather(clock, following) if following else 0.0
        clock.arrive(name, f"wait_{_safe(name)}: bf16[{BLOCK_NUMEL}] = wait(gathered)", arrived)
        _block(clock, name, FORWARD_LINES - 2, 5200.0, SAVED_BYTES)
        clock.gathered.discard(name)
    clock.add("return [add_80, *saved]", "", "", "output")
    yield from clock.lines


def _backward(names: list[str]) -> Iterator[Line]:
    clock = Clock(saved_bytes=len(names) * SAVED_BYTES)
    clock.add("tangents_1: f32[1, 8192, 128256] = input()", "", "", "input")
    names = names[::-1]
    arrival, reduced = _gather(clock, names[0]), 0.0
    for name, following in zip(names, [*names[1:], ""], strict=True):
        arrived, arrival = arrival, _gather(clock, following) if following else 0.0
        safe = _safe(name)
        clock.arrive(name, f"wait_{safe}: bf16[{BLOCK_NUMEL}] = wait(gathered)", arrived)
        _block(clock, name, BACKWARD_LINES - 6, 9800.0, -SAVED_BYTES)
        clock.gathered.discard(name)
        clock.add(f"pack_{safe}: f32[{BLOCK_NUMEL}] = pack([mm, mm_1])", name, name, "pack", 600.0)
        clock.arrive(name, f"wait_{safe}_1: f32[{BLOCK_NUMEL // SHARD}] = wait(sum)", reduced)
        own = BLOCK_NUMEL // SHARD
        note = f"# reduce-scatter {name}, {4 * BLOCK_NUMEL:,} B f32, shard={SHARD}"
        text = f"scatter_{safe}: f32[{own}] = scatter(pack)  {note}"
        clock.add(text, name, name, "scatter", SCATTER_US)
        note = f"# all-reduce {name}, {4 * own:,} B f32, replicate={REPLICAS}"
        text = f"reduce_{safe}: f32[{own}] = reduce(scattered)  {note}"
        clock.add(text, name, name, "reduce", REDUCE_US)
        reduced = clock.network
    clock.add("return [None, *gradients]", "", "", "output")
    yield from clock.lines


def _gather(clock: Clock, name: str) -> float:
    """Starts a gather; returns when its data arrives."""
    clock.gathered.add(name)
    clock.add(_gather_text(name), name, name, "gather", GATHER_US)
    return clock.network


def _gather_text(name: str) -> str:
    return (
        f"gather_{_safe(name)}: bf16[{BLOCK_NUMEL}] = gather(primals_{len(name)})"
        f"  # all-gather {name}, {BLOCK_BYTES:,} B bf16, shard={SHARD}"
    )


def _block(clock: Clock, name: str, count: int, us: float, saved_bytes: int) -> None:
    """`count` statements of one block, which take `us` together."""
    big = us / (count / len(OPERATORS)) * 0.8
    for i in range(count):
        operator = OPERATORS[i % len(OPERATORS)]
        view = operator in ("view", "transpose")
        module = f"{name}.{MODULES[i * len(MODULES) // count]}"
        shape = "bf16[1, 8192, 8192]" if i % 3 else "bf16[1, 8192, 28672]"
        text = (
            f"{operator}_{_safe(name)}_{i}: {shape} = aten.{operator}(view_{i}, {operator}_{i - 1})"
        )
        small = 0.0 if view else big / 20
        duration = big if operator == "mm" else small
        clock.saved_bytes += saved_bytes // count
        clock.add(text, module, name, "view" if view else "compute", duration)


def _passes(
    names: list[str], forward: list[Line], backward: list[Line]
) -> Iterator[dict[str, Any]]:
    for name in PASSES[:6]:
        yield _entry(name, "joint", "", _rewritten(names, name) if _rewrites(name) else [])
    for name in PASSES[6:]:
        moves = not name.startswith(("limit", "verify"))
        for stage, lines in (("forward", forward), ("backward", backward)):
            yield _entry(name, stage, stage, _moved(lines) if moves else [])


def _rewrites(name: str) -> bool:
    return name.startswith(("partition", "precision", "reshard"))


def _entry(name: str, stage: str, program: str, diff: Diff) -> dict[str, Any]:
    added = sum(tag == "+" for tag, _ in diff)
    removed = sum(tag == "-" for tag, _ in diff)
    moved = min(added, removed) if stage != "joint" else 0
    return {
        "name": name,
        "stage": stage,
        "program": program,
        "added": added - moved,
        "removed": removed - moved,
        "moved": moved,
        "diff": diff,
    }


def _rewritten(names: list[str], name: str) -> Diff:
    """Reads of parameters become a gather and views, block by block."""
    diff: Diff = []
    for block in names:
        safe = _safe(block)
        diff.append(["@", f" {block}.attention.wq"])
        diff.append([" ", _padded(f"view_{safe}: bf16[8192, 8192] = aten.view(x, [8192, 8192])")])
        for key, shape in PARAMETERS.items():
            text = f"{_safe(key)}_{safe}: f32{shape} = parameter(primals_3, '{block}.{key}')"
            diff.append(["-", _padded(text)])
        diff.append(["+", _padded(_gather_text(block), BLOCK_BYTES)])
        for key, shape in PARAMETERS.items():
            text = f"{_safe(key)}_{safe}: bf16{shape} = aten.view(slice_{safe}, {shape})"
            diff.append(["+", _padded(text, BLOCK_BYTES)])
        diff.append([" ", _padded(f"mm_{safe}: bf16[8192, 8192] = aten.mm(view, {name[:4]})")])
    return diff


def _moved(lines: list[Line]) -> Diff:
    """Each gather goes up some statements."""
    diff: Diff = []
    for at, line in enumerate(lines):
        if line[3] != "gather" or at < 12:
            continue
        diff.append(["@", f" {line[1]}"])
        shown = [_padded(other[0], other[4]) for other in lines[at - 12 : at + 3]]
        diff.extend([" ", text] for text in shown[:2])
        diff.append(["+", shown[12]])
        diff.extend([" ", text] for text in shown[2:4])
        diff.append(["@", f" {lines[at + 1][1]}"])
        diff.extend([" ", text] for text in shown[10:12])
        diff.append(["-", shown[12]])
        diff.extend([" ", text] for text in shown[13:])
    return diff


def _padded(text: str, gathered_bytes: int = 0) -> str:
    return f"{text:<100} | {gathered_bytes:,}"


def _safe(name: str) -> str:
    return name.replace(".", "_")
