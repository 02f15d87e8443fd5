"""The first time of the kernels on a GPU: ceilings, correctness, sanitizers, times, rivals, counters of DRAM.

Usage: python benchmarks/device_check.py [--output FILE] [--only PART,PART] [--rehearse]

Each part runs in a process of its own and within its own time, so that one that fails or hangs costs no other; all
together take less than eight minutes. JSON comes first (or goes to FILE), a short table last. Exit code 0: all that ran
is right; 1: something is wrong or failed; 3: there is no GPU, or what it needs is missing.

Needs NumPy, PyYAML, CuPy and NVRTC, and no network. Kernels that were compiled before with the same NVRTC and lie in
the cache folder (`kvplan kernel-bench --compile-only`) are not compiled again. ``--rehearse`` takes the emulated GPU of
the tests: everything is small, and the times are made up. It has not run on a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from kvplan.errors import InputError, KvplanError
from kvplan.jobs.kernel_bench import RIVALS
from kvplan.kernels.cases import CASES, problem
from kvplan.kernels.device import Device, find_device
from kvplan.kernels.emulation.emulate import Order
from kvplan.kernels.gpu_bench import spread_of
from kvplan.kernels.gpu_solver import GpuSolver
from kvplan.kernels.launch import launch, load_function
from kvplan.kernels.number_formats import number_format
from kvplan.kernels.plan import CHUNK_STEP
from kvplan.kernels.rivals import RivalMissing, rival_calls
from kvplan.kernels.shape import Shape
from kvplan.kernels.timed_batch import NoRoom, TimedBatch, timed_batch
from kvplan.kernels.timing import Timer
from kvplan.kernels.validate import validate
from kvplan.kernels.variants import Variant, attention_variant, default_variants

ROOT = Path(__file__).resolve().parents[1]
#: Seconds that each part may take.
BUDGETS_S = {
    "ceilings": 40,
    "correctness": 100,
    "sanitizers": 80,
    "times": 100,
    "splits": 40,
    "rivals": 60,
    "counters": 40,
}
#: Parts that others start, under a tool that watches.
WATCHED = ("tiny", "one")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
TINY_CASES = ("partial last block", "many splits", "empty requests", "window and splits")
#: Products that are checked for each timed row: its cases are checked in `correctness`.
CHECKED_PAIRS = 1 << 17
MOST_POOL_BYTES = 20 << 30

PROBES = """
struct ProbeParams { const void* source; void* sink; long long count; };
extern "C" __global__ void kvplan_probe_{name}(const ProbeParams p) {{ {body} }}
"""
READ = """
    const uint4* source = (const uint4*)p.source;
    const long long step = (long long)gridDim.x * blockDim.x;
    unsigned found = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += 4 * step) {
        uint4 four[4];
        for (int n = 0; n < 4; n++) {
            const long long at = i + n * step;
            four[n] = source[at < p.count ? at : i];
        }
        for (int n = 0; n < 4; n++) found |= four[n].x | four[n].y | four[n].z | four[n].w;
    }
    if (found) *(unsigned*)p.sink = found;
"""
CHASE = """
    unsigned at = 0;
    if (threadIdx.x == 0) {
        for (long long i = 0; i < p.count; i++) at = ((const unsigned*)p.source)[at];
        *(unsigned*)p.sink = at;
    }
"""


class ProbeParams(ctypes.Structure):
    """Of the probes: what they read, where their result goes, how much they do."""

    _fields_ = (("source", ctypes.c_void_p), ("sink", ctypes.c_void_p), ("count", ctypes.c_longlong))


@dataclass(frozen=True)
class Probe(Variant):
    """A small kernel of this script, compiled and loaded as the others are."""

    body: str = ""

    @property
    def name(self) -> str:
        """The entry's name."""
        return f"kvplan_probe_{self.kernel}"

    @property
    def source(self) -> str:
        """The whole text."""
        head, tail = PROBES.split("\nextern", 1)
        return head + "\nextern" + tail.format(name=self.kernel, body=self.body)


@dataclass
class Run:
    """One part: the GPU, how much is left of its time, and where its findings go as they come."""

    device: Device
    is_rehearsal: bool
    deadline: float
    path: Path

    def report(self, found: object) -> None:
        """Write what is known so far: if the part is ended, this is what it gave."""
        self.path.write_text(json.dumps(found), encoding="utf-8")

    def has_time(self) -> bool:
        """Whether another row may be begun."""
        return time.monotonic() < self.deadline

    def seconds(self, timer: Timer, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Repeats, fewer in a rehearsal."""
        return timer.seconds(calls, warmups=2, repeats=4) if self.is_rehearsal else timer.seconds(calls)

    def batch(self, shape: Shape) -> TimedBatch:
        """Arrays for a shape, in memory that is free again afterwards."""
        import_module("cupy").get_default_memory_pool().free_all_blocks()
        return timed_batch(shape, l2_cache_bytes=self.device.l2_cache_bytes)


# Parts


def ceilings(run: Run) -> None:
    """What this GPU gives at best: a copy, reading alone, an empty launch, one access after another."""
    cupy = import_module("cupy")
    timer = Timer(run.device)
    found: dict[str, object] = {"copy_bytes_per_s": timer.copy_bytes_per_s()}
    run.report(found)
    free, _ = cupy.cuda.runtime.memGetInfo()
    sink = cupy.zeros(4, dtype=cupy.uint32)

    def probe(name: str, body: str, source: Any, count: int, blocks: int) -> float:
        function = load_function(Probe(name, body=body), run.device.arch)
        arguments = ProbeParams(source.data.ptr, sink.data.ptr, count)
        return spread_of(run.seconds(timer, [partial(launch, function, (blocks, 1), arguments, 0)])).p50

    size = min(4 << 30, free // 4) // 16 * 16
    blocks = run.device.num_sms * 16
    zeros = cupy.zeros(size // 4, dtype=cupy.uint32)
    found["read_bytes_per_s"] = size / probe("read", READ, zeros, size // 16, blocks)
    found["empty_launch_s"] = probe("empty", "", zeros, 0, 1)
    del zeros
    run.report(found)
    places = min(1 << 21, free // 8 // 128)
    steps = 100 if run.is_rehearsal else 20_000
    order = np.random.default_rng(0).permutation(places).astype(np.uint32)
    following = np.zeros(places * 32, dtype=np.uint32)  # one in each 128 bytes: more than L2 holds
    following[order * 32] = np.roll(order, -1) * 32
    found["access_latency_s"] = probe("chase", CHASE, cupy.asarray(following), steps, 1) / steps
    run.report(found)


def correctness(run: Run) -> None:
    """The default variants on every seeded case; where one is wrong, which numbers."""
    variants = [one for one in default_variants() if one.kernel != "merge"]
    cases = CASES
    if run.is_rehearsal:
        variants = [attention_variant("mma", head_dim=64, group=8, dtype="bfloat16"), Variant("copy_blocks")]
        cases = tuple(case for case in CASES if case.name in TINY_CASES)
    solver = GpuSolver(run.device)
    found: dict[str, Any] = {"cases": 0, "valid": 0, "largest_share_of_tolerance": {}, "wrong": []}
    for row in validate(variants, cases, solver=solver):
        found["cases"] += 1
        found["valid"] += row.valid
        used = found["largest_share_of_tolerance"]
        if row.valid and row.tolerance:
            used[row.variant] = max(used.get(row.variant, 0.0), row.tolerance["used"])
        if not row.valid and len(found["wrong"]) < 20:
            found["wrong"].append(
                {
                    "variant": row.variant,
                    "case": row.case,
                    "error": row.error,
                    "at": wrong_places(solver, row),
                }
            )
        if not run.has_time():
            found["stopped"] = "out of time"
            break
        if found["cases"] % 50 == 0:
            run.report(found)
    run.report(found)


def wrong_places(solver: GpuSolver, row: Any) -> list[object]:
    """Up to 8 (request, head, element, found, expected): they tell a wrong layout of fragments."""
    variant = next((one for one in default_variants() if one.name == row.variant), None)
    case = next((one for one in CASES if one.name == row.case), None)
    if variant is None or case is None or row.error is not None:
        return []
    posed = problem(variant, case)
    outcome = solver.attend(solver.build([variant]), posed, order=Order.FORWARD)
    if "output" not in outcome.outputs:
        return []
    output = number_format(variant.dtype).decoded(outcome.outputs["output"])
    allowed = posed.tolerance.absolute + posed.tolerance.relative * np.abs(posed.expected.output)
    wrong = np.argwhere(~(np.abs(output - posed.expected.output) <= allowed))[:8]
    return [
        [*map(int, at), repr(float(output[tuple(at)])), repr(float(posed.expected.output[tuple(at)]))]
        for at in wrong
    ]


def sanitizers(run: Run) -> None:
    """compute-sanitizer's four tools over four tiny cases, each in a process of its own."""
    found: dict[str, str] = {}
    tool = find_tool("compute-sanitizer")
    for name in SANITIZERS if tool else ():
        command = [
            str(tool),
            "--tool",
            name,
            "--error-exitcode",
            "9",
            *child("tiny", run, run.path.with_name("tiny")),
        ]
        limit = max(5.0, run.deadline - time.monotonic())
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            found[name] = "out of time"
            break
        said = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", answer.stdout)
        found[name] = said[-1] if said else f"exit code {answer.returncode}: {answer.stderr[-300:]}"
        run.report({"said": found})
    run.report({"said": found} if tool else {"skipped": "compute-sanitizer is not installed"})


def tiny(run: Run) -> None:
    """What the sanitizers watch: four cases, once."""
    variants = [
        attention_variant(name, head_dim=64, group=4, dtype="bfloat16") for name in ("naive", "split", "mma")
    ]
    cases = [case for case in CASES if case.name in TINY_CASES]
    rows = list(validate([*variants, Variant("copy_blocks")], cases, solver=GpuSolver(run.device)))
    run.report({"cases": len(rows), "valid": sum(row.valid for row in rows)})


def grid(run: Run) -> list[Shape]:
    """About forty rows: what matters most first, in case time runs out."""
    if run.is_rehearsal:
        return [
            Shape(2, 40, 8, 2, 64, 16, "bfloat16", "bfloat16"),
            Shape(1, 64, 4, 4, 64, 1, "bfloat16", "fp8_e4m3"),
        ]
    base = Shape(32, 4096, 32, 8, 128, 16, "bfloat16", "bfloat16")
    rows = [
        base._replace(batch=batch, seq=seq)
        for batch, seq in (
            (32, 4096),
            (64, 16384),
            (8, 4096),
            (1, 16384),
            (256, 4096),
            (8, 65536),
            (1, 65536),
        )
    ]
    rows += [
        base._replace(kv_cache_dtype="fp8_e4m3", batch=b, seq=s)
        for b, s in ((32, 4096), (64, 16384), (8, 16384))
    ]
    for heads, kv_heads in ((64, 8), (32, 32), (8, 1)):
        rows += [
            base._replace(heads=heads, kv_heads=kv_heads, batch=batch, seq=seq)
            for batch, seq in ((32, 4096), (64, 16384), (8, 4096))
        ]
    rows += [
        base._replace(block_size=size, batch=b, seq=s)
        for size in (1, 64)
        for b, s in ((32, 4096), (8, 16384))
    ]
    rows += [base._replace(head_dim=size) for size in (64, 256)]
    rows += [
        base._replace(dtype="float32", kv_cache_dtype="float32"),
        base._replace(dtype="float16", kv_cache_dtype="float16"),
    ]
    rows += [
        base._replace(batch=batch, seq=seq)
        for batch in (1, 8, 32, 64, 256)
        for seq in (1024, 4096, 16384, 65536)
    ]
    return [one for one in dict.fromkeys(rows) if one.pool_bytes <= MOST_POOL_BYTES]


def times(run: Run) -> None:
    """Each row of the grid by the default kernel, checked on the shape; small batches as a CUDA graph too."""
    timer = Timer(run.device)
    found: dict[str, Any] = {"copy_bytes_per_s": timer.copy_bytes_per_s(), "rows": []}
    for shape in grid(run):
        if not run.has_time():
            found["stopped"] = "out of time"
            break
        try:
            found["rows"].append(timed_row(run, timer, shape, found["copy_bytes_per_s"]))
        except (NoRoom, InputError) as error:
            found["rows"].append({"shape": str(shape), "skipped": error.what})
        run.report(found)
    run.report(found)


def chosen(run: Run, shape: Shape, kernel: str = "auto") -> Variant:
    """The kernel of a shape on this GPU."""
    return attention_variant(
        kernel,
        head_dim=shape.head_dim,
        group=shape.group,
        dtype=shape.dtype,
        kv_cache_dtype=shape.kv_cache_dtype,
        architecture=run.device.arch,
    )


def timed_row(run: Run, timer: Timer, shape: Shape, copy: float) -> dict[str, object]:
    """One row, as JSON."""
    batch, variant = run.batch(shape), chosen(run, shape)
    launches = batch.attention(variant)
    verdict, error = batch.check(variant, launches[0], pairs=CHECKED_PAIRS)
    row: dict[str, object] = {
        "shape": str(shape),
        "kernel": variant.kernel,
        "valid": verdict.valid and error is None,
    }
    row["error"] = error if error or verdict.valid else f"off by {verdict.max_abs_error:.3g}"
    if not row["valid"]:
        return row
    spread = spread_of(run.seconds(timer, [one.run for one in launches]))
    work = launches[0].work
    row |= {
        "time_s": spread._asdict(),
        "bytes_moved": shape.bytes_moved,
        "achieved_bytes_per_s": shape.bytes_moved / spread.p50,
        "copy_share": shape.bytes_moved / spread.p50 / copy,
        "work_items": None if work is None else len(work.work_items),
        "chunk_tokens": None if work is None else work.chunk_tokens,
    }
    datasheet = run.device.bandwidth_bytes_per_s
    row["bandwidth_share"] = shape.bytes_moved / spread.p50 / datasheet if datasheet else None
    if shape.batch <= 4:
        row["graph"] = graph_times(run, timer, launches[0].run)
    return row


def graph_times(run: Run, timer: Timer, call: Callable[[], object]) -> object:
    """Replays of one launch as a CUDA graph, or why there is none."""
    try:
        stream = import_module("cupy").cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            call()
            graph = stream.end_capture()
            return spread_of(run.seconds(timer, [graph.launch]))._asdict()
    except (RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def splits(run: Run) -> None:
    """Chunks swept on six rows, to fit what a work item (c0) and a split (c1) cost in tokens of a block of threads."""
    base = Shape(1, 16384, 32, 8, 128, 16, "bfloat16", "bfloat16")
    shapes = [
        base._replace(batch=b, seq=s)
        for b, s in ((1, 16384), (4, 8192), (8, 4096), (16, 4096), (32, 2048), (1, 65536))
    ]
    if run.is_rehearsal:
        shapes = [Shape(2, 500, 4, 2, 64, 16, "bfloat16", "bfloat16")]
    timer = Timer(run.device)
    found: list[dict[str, Any]] = []
    for shape in shapes:
        batch, variant, rows = run.batch(shape), chosen(run, shape), []
        concurrent = run.device.num_sms * variant.blocks_per_sm
        chunk = -(-shape.seq // CHUNK_STEP) * CHUNK_STEP
        while chunk >= 2 * CHUNK_STEP and run.has_time():
            launches = batch.attention(variant, chunk_tokens=chunk)
            p50 = spread_of(run.seconds(timer, [one.run for one in launches])).p50
            work = launches[0].work
            waves = -(-len(work.work_items) // concurrent) if work is not None else 1
            rows.append(
                {"chunk": min(chunk, shape.seq), "splits": -(-shape.seq // chunk), "waves": waves, "p50": p50}
            )
            chunk = chunk // 2 // CHUNK_STEP * CHUNK_STEP
        found.append({"shape": str(shape), "rows": rows, **fitted(rows)})
        run.report({"shapes": found})


def fitted(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """c0 and c1 of `SplitCost`: p50 = a (waves (chunk + c0) + c1 splits), by least squares; None with too few rows."""
    if len(rows) < 4:
        return {"c0_tokens": None, "c1_tokens": None}
    terms = np.array(
        [[one["waves"] * one["chunk"], one["waves"], one["splits"]] for one in rows], dtype=float
    )
    token, item, split = np.linalg.lstsq(terms, np.array([one["p50"] for one in rows]), rcond=None)[0]
    return (
        {"c0_tokens": float(item / token), "c1_tokens": float(split / token)}
        if token > 0
        else {
            "c0_tokens": None,
            "c1_tokens": None,
        }
    )


def rivals(run: Run) -> None:
    """Other libraries on the same arrays, between two runs of our kernel."""
    base = Shape(32, 4096, 32, 8, 128, 16, "bfloat16", "bfloat16")
    shapes = [
        base,
        base._replace(batch=64, seq=16384),
        base._replace(batch=8, block_size=256),
        base._replace(heads=64),
    ]
    if run.is_rehearsal:
        shapes = [Shape(1, 40, 8, 2, 64, 16, "bfloat16", "bfloat16")]
    timer, found = Timer(run.device), []
    for shape in shapes:
        batch = run.batch(shape)
        ours = [one.run for one in batch.attention(chosen(run, shape))]
        for name in RIVALS:
            if not run.has_time():
                break
            row: dict[str, object] = {"shape": str(shape), "rival": name}
            found.append(row)
            try:
                rival = rival_calls(name, batch)
                before = spread_of(run.seconds(timer, ours)).p50
                theirs = spread_of(run.seconds(timer, rival.calls)).p50
                after = spread_of(run.seconds(timer, ours)).p50
                row |= {"version": rival.version, "time_s": theirs, "ours_s": min(before, after)}
                row["achieved_bytes_per_s"] = shape.bytes_moved / theirs
            except RivalMissing as error:
                row["skipped"] = error.what
            except Exception as error:  # a library may refuse a shape in any way, and the others are to run
                row["skipped"] = f"{type(error).__name__}: {error}"[:300]
            run.report({"rows": found})


def counters(run: Run) -> None:
    """Bytes that DRAM gave, by Nsight Compute, beside those that have to be moved, on three rows."""
    tool = find_tool("ncu")
    if tool is None:
        run.report({"skipped": "ncu is not installed"})
        return
    found: list[dict[str, object]] = []
    for number, shape in enumerate(grid(run)[:3]):
        if not run.has_time():
            break
        command = [
            str(tool),
            "--metrics",
            "dram__bytes_read.sum,dram__bytes_write.sum",
            "--csv",
            "--print-units",
            "base",
        ]
        command += ["--kernel-name", "regex:kvplan_.*", "--launch-count", "2"]
        command += child("one", run, run.path.with_name("one"), str(number))
        limit = max(5.0, run.deadline - time.monotonic())
        answer = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        counted = [
            (line.split('","')[-3], float(line.rstrip('"').split('","')[-1].replace(",", "")))
            for line in answer.stdout.splitlines()
            if "dram__bytes" in line
        ]
        row: dict[str, object] = {
            "shape": str(shape),
            "bytes_moved": shape.bytes_moved,
            "dram_bytes": counted,
        }
        if not counted:
            row["failed"] = (answer.stdout + answer.stderr)[-400:]
        found.append(row)
        run.report({"rows": found})


def one(run: Run, number: int = 0) -> None:
    """What ncu watches: one launch of a row."""
    shape = grid(run)[number]
    run.batch(shape).attention(chosen(run, shape))[0].run()
    import_module("cupy").cuda.runtime.deviceSynchronize()
    run.report({"shape": str(shape)})


PARTS: dict[str, Callable[..., None]] = {
    "ceilings": ceilings,
    "correctness": correctness,
    "sanitizers": sanitizers,
    "times": times,
    "splits": splits,
    "rivals": rivals,
    "counters": counters,
    "tiny": tiny,
    "one": one,
}


# Running them


def find_tool(name: str) -> Path | None:
    """A tool of CUDA, on the path or where CUDA is usually installed."""
    on_path = shutil.which(name)
    if on_path is not None:
        return Path(on_path)
    places = [*Path("/usr/local").glob(f"cuda*/bin/{name}"), *Path("/opt/nvidia").glob(f"*/*/{name}")]
    return max(places, default=None)


def child(part: str, run: Run, path: Path, *more: str) -> list[str]:
    """The command of a part in a process of its own."""
    seconds = run.deadline - time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part, "--output", str(path)]
    return [*command, "--seconds", f"{seconds:.0f}", *["--rehearse"] * run.is_rehearsal, *more]


@contextmanager
def gpu(*, is_rehearsal: bool) -> Iterator[Device]:
    """The GPU that is here, or the emulated one of the tests. Raises `CudaMissing`."""
    if not is_rehearsal:
        yield find_device()
        return
    sys.path.insert(0, str(ROOT / "tests"))
    stand_in = import_module("emulated_cupy")
    with stand_in.emulated_gpu(memory_bytes=1 << 27) as emulated:
        emulated.structs["probe"] = ProbeParams
        yield find_device()


def run_part(arguments: argparse.Namespace) -> int:
    """One part in this process."""
    with gpu(is_rehearsal=arguments.rehearse) as device:
        deadline = time.monotonic() + arguments.seconds
        run = Run(device, arguments.rehearse, deadline, Path(arguments.output))
        PARTS[arguments.part](run, *arguments.numbers)
    return 0


def run_all(arguments: argparse.Namespace) -> int:
    """All parts, each in a process of its own; prints or writes what they found."""
    names = arguments.only.split(",") if arguments.only else list(BUDGETS_S)
    for name in names:
        if name not in BUDGETS_S:
            raise InputError(f'unknown part "{name}"', where="--only", hint=f"known: {', '.join(BUDGETS_S)}")
    with gpu(is_rehearsal=arguments.rehearse) as device:
        document: dict[str, Any] = {
            "rehearsal": arguments.rehearse,
            "device": device.to_dict(),
            "driver": driver_says(),
        }
    document["parts"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            document["parts"][name] = watched(name, Path(folder) / f"{name}.json", arguments.rehearse)
    text = json.dumps(document, indent=1)
    if arguments.output:
        Path(arguments.output).write_text(text, encoding="utf-8")
    else:
        print(text)
    return print_table(document)


def watched(name: str, path: Path, is_rehearsal: bool) -> dict[str, Any]:
    """A part in a process: what it found, how long it took, and how it failed."""
    start = time.monotonic()
    budget = BUDGETS_S[name]
    command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--output", str(path)]
    command += ["--seconds", str(budget - 10), *["--rehearse"] * is_rehearsal]
    failed = None
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=budget, check=False)
        if answer.returncode:
            failed = f"exit code {answer.returncode}: {answer.stderr[-1500:]}"
    except subprocess.TimeoutExpired:
        failed = f"ended after {budget} s"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return {"found": found, "failed": failed, "seconds": round(time.monotonic() - start, 1)}


def driver_says() -> str | None:
    """Name, driver, clocks and power, as nvidia-smi has them."""
    if shutil.which("nvidia-smi") is None:
        return None
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return answer.stdout.strip() or answer.stderr.strip()


def print_table(document: dict[str, Any]) -> int:
    """The short table; 1 if something is wrong or failed."""
    print(
        f"\n{document['device']['name']}{' (emulated: all times are made up)' if document['rehearsal'] else ''}"
    )
    is_wrong = False
    for name, part in document["parts"].items():
        found = part["found"] or {}
        state = part["failed"].splitlines()[-1] if part["failed"] else found.get("skipped") or "done"
        print(f"{name:12} {part['seconds']:6.1f} s  {state}")
        is_wrong |= part["failed"] is not None
        for line, wrong in lines(name, found):
            print(f"    {line}")
            is_wrong |= wrong
    return int(is_wrong)


def lines(name: str, found: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """What a part found, a line each, and whether it is bad news."""
    if name == "ceilings":
        for key, value in found.items():
            yield (
                (f"{key}: {value / 1e9:,.1f} GB/s" if "bytes" in key else f"{key}: {1e9 * value:,.0f} ns"),
                False,
            )
    if name == "correctness" and found:
        yield f"{found['valid']} of {found['cases']} cases valid", found["valid"] != found["cases"]
        yield from (
            (f"wrong: {one['variant']} on {one['case']}: {one['error']}", True) for one in found["wrong"]
        )
    if name == "sanitizers":
        for tool, said in found.get("said", {}).items():
            yield f"{tool}: {said}", re.search(r"SUMMARY: 0 (errors|hazards)", said) is None
    if name == "times":
        for row in found.get("rows", ()):
            yield row_line(row), row.get("valid") is False
    if name == "splits":
        for row in found.get("shapes", ()):
            yield f"{row['shape']}: c0 {row['c0_tokens']}, c1 {row['c1_tokens']} tokens", False
    if name == "rivals":
        for row in found.get("rows", ()):
            ratio = row["time_s"] / row["ours_s"] if "time_s" in row else 0.0
            yield (
                f"{row['shape']}: {row['rival']} {row.get('skipped') or f'takes x {ratio:.2f} of our time'}",
                False,
            )
    if name == "counters":
        for row in found.get("rows", ()):
            read = sum(value for metric, value in row["dram_bytes"])
            yield f"{row['shape']}: {read:,.0f} of DRAM for {row['bytes_moved']:,}", False


def row_line(row: dict[str, Any]) -> str:
    """A timed row."""
    if "time_s" not in row:
        return f"{row['shape']}: {row.get('skipped') or row.get('error')}"
    of_datasheet = f", {100 * row['bandwidth_share']:.0f} % of datasheet" if row["bandwidth_share"] else ""
    return (
        f"{row['shape']}: {row['kernel']} {1e6 * row['time_s']['p50']:.1f} us, "
        f"{row['achieved_bytes_per_s'] / 1e9:,.0f} GB/s, {100 * row['copy_share']:.0f} % of copy{of_datasheet}"
    )


def main() -> int:
    """Run all parts, or one that another process asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", help="where the JSON goes")
    parser.add_argument("--only", help=f"some of {','.join(BUDGETS_S)}")
    parser.add_argument("--rehearse", action="store_true", help="with the emulated GPU of the tests")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("numbers", nargs="*", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
        return run_part(arguments) if arguments.part else run_all(arguments)
    except KvplanError as error:
        print(f"device_check: {error}\n{error.hint or ''}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
