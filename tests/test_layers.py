"""Who may import whom, read from the source: docs/design.md says why."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kvplan

PACKAGE = Path(kvplan.__file__).resolve().parent
SOURCES = {
    ".".join(["kvplan", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
CORE = [name for name in SOURCES if name.startswith("kvplan.core.")]

#: The two chains of the core, lowest first. A module imports from its own chain only what stands lower, and
#: from the other chain nothing: they meet in whole numbers. The allocator never learns what a model is.
MEMORY = {
    "gpu": 0,
    "name_patterns": 0,
    "quantization": 1,
    "weights": 2,
    "kv_cache": 3,
    "architectures": 3,
    "kv_groups": 4,
    "model": 4,
    "attention": 4,
    "rotary": 5,
    "lora": 3,
    "layouts": 5,
    "towers": 6,
    "families": 7,
    "vllm_rules": 5,
    "engine_rules": 5,
    "deployment": 5,
    "overhead": 6,
    "kv_pool": 6,
    "concurrency": 7,
    "sizing": 8,
    "kept_layers": 7,
    "pools": 8,
    "engine_sizing": 9,
    "explain": 9,
}
SCHEDULING = {
    "request": 0,
    "arrivals": 1,
    "drafts": 0,
    "livelock": 0,
    "buddy": 0,
    "content": 1,
    "paged_blocks": 2,
    "extents": 2,
    "window_blocks": 2,
    "engine": 5,
    "cohort": 6,
    "plain_pool": 6,
    "plain_groups": 7,
    "plain_states": 8,
    "block_side": 7,
    "full_blocks": 8,
    "group_kinds": 8,
    "group_slots": 9,
    "group_blocks": 10,
    "engines": 11,
    "communication": 0,
    "step_constants": 1,
    "step_shape": 6,
    "cost": 7,
    "tally": 0,
    "robust_fit": 0,
    "preemptions": 6,
    "metrics": 7,
    "simulate": 8,
    "pool_map": 9,
    "course": 9,
}

#: Libraries, and the only modules that may import them; a name that ends in a dot is a whole package.
HOMES = {
    "typer": ["kvplan.cli", "kvplan.cli."],
    "click": [],
    "rich": ["kvplan.report.", "kvplan.cli.progress"],
    "yaml": ["kvplan.safe_yaml"],
    "matplotlib": ["kvplan.plots"],
    "numpy": ["kvplan.kernels.", "kvplan.topics.paged_attention"],
    "cupy": ["kvplan.kernels."],
    "huggingface_hub": ["kvplan.hub"],
    "msgspec": [],
}

#: Of the standard library, what touches files, clocks, other processes or hidden state.
_NAMES = (
    "asyncio atexit builtins ctypes datetime gc getpass glob importlib inspect io locale logging "
    "multiprocessing os pathlib pickle platform random resource secrets shutil signal socket subprocess sys "
    "tempfile threading time urllib uuid warnings weakref"
)
IMPURE = frozenset(_NAMES.split())


@cache
def tree(name: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(SOURCES[name].read_text(encoding="utf-8"))


def imports(name: str) -> Iterator[str]:
    """Every module that a module imports, wherever in it; ``from a import b`` counts as ``a`` and ``a.b``."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            assert node.module is not None
            yield node.module
            for alias in node.names:
                if f"{node.module}.{alias.name}" in SOURCES:
                    yield f"{node.module}.{alias.name}"


def own(name: str) -> set[str]:
    """The modules of kvplan that a module imports, bare packages left out."""
    return {one for one in imports(name) if one in SOURCES and SOURCES[one].name != "__init__.py"}


def place(name: str) -> str:
    """A core module's name in the chains: all engines share one, parts of an engine have their own."""
    package, _, module = name.removeprefix("kvplan.core.").partition(".")
    return module if module in SCHEDULING else package


def called(name: str) -> set[str]:
    """Names of builtins that a module calls."""
    return {
        n.func.id for n in ast.walk(tree(name)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_only_the_standard_library_and_itself(name: str) -> None:
    for module in imports(name):
        top = module.partition(".")[0]
        if top == "kvplan":
            assert module == "kvplan.errors" or module.startswith("kvplan.core"), module
        else:
            assert top in sys.stdlib_module_names, module
            assert top not in IMPURE, module


@pytest.mark.parametrize("name", CORE)
def test_the_core_neither_reads_nor_prints(name: str) -> None:
    assert not called(name) & {
        "open",
        "print",
        "input",
        "exec",
        "eval",
        "compile",
        "__import__",
        "breakpoint",
    }


@pytest.mark.parametrize("name", [name for name in CORE if SOURCES[name].name != "__init__.py"])
def test_a_core_module_imports_only_what_stands_lower_in_its_chain(name: str) -> None:
    chains = [chain for chain in (MEMORY, SCHEDULING) if place(name) in chain]
    assert chains, f"say in this test to which chain {name} belongs"
    (chain,) = chains
    for module in own(name) - {"kvplan.errors"}:
        assert place(module) in chain, f"{module} belongs to the other chain"
        assert chain[place(module)] < chain[place(name)], f"{module} does not stand below {name}"


def test_the_chains_have_no_module_in_common() -> None:
    assert not MEMORY.keys() & SCHEDULING.keys()


def test_the_plain_engine_knows_only_requests_contents_and_the_engines_face() -> None:
    parts = {f"kvplan.core.engines.{name}" for name in ("plain_pool", "plain_groups", "plain_states")}
    known = {f"kvplan.core.{name}" for name in ("content", "engine", "livelock", "request")}
    assert own("kvplan.core.engines.vllm_plain") == parts | known
    for part in parts:
        assert own(part) <= parts | known


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_in_its_home_only(library: str) -> None:
    homes = HOMES[library]
    users = [name for name in SOURCES if any(one.partition(".")[0] == library for one in imports(name))]
    strangers = [
        name
        for name in users
        if name not in homes and not any(home.endswith(".") and name.startswith(home) for home in homes)
    ]
    assert strangers == []


def test_no_other_library_is_imported() -> None:
    known = {*HOMES, "kvplan", *sys.stdlib_module_names}
    found = {one.partition(".")[0] for name in SOURCES for one in imports(name)}
    assert found <= known


@pytest.mark.parametrize("name", SOURCES)
def test_only_the_command_line_knows_the_command_line(name: str) -> None:
    if name.startswith("kvplan.cli") or name == "kvplan.__main__":
        return
    assert not [one for one in imports(name) if one.startswith("kvplan.cli")]


#: Modules and what they may import of kvplan outside the core, with all that lies in a named package.
OUTER = {
    "kvplan.errors": [],
    "kvplan.text": [],
    "kvplan.units": ["kvplan.errors"],
    "kvplan.safe_yaml": ["kvplan.errors"],
    "kvplan.safetensors": ["kvplan.errors"],
    "kvplan.hub": ["kvplan.errors", "kvplan.safetensors"],
    "kvplan.gguf": ["kvplan.errors"],
    "kvplan.gguf_config": ["kvplan.errors", "kvplan.gguf", "kvplan.safetensors"],
    "kvplan.catalogue": ["kvplan.errors", "kvplan.safe_yaml"],
    "kvplan.hf_config": ["kvplan.errors", "kvplan.safetensors"],
    "kvplan.config": [
        "kvplan.catalogue",
        "kvplan.errors",
        "kvplan.gguf",
        "kvplan.gguf_config",
        "kvplan.hf_config",
        "kvplan.hub",
        "kvplan.safe_yaml",
        "kvplan.safetensors",
    ],
    "kvplan.inputs": ["kvplan.errors"],
    "kvplan.trace_lines": ["kvplan.errors"],
    "kvplan.trace_rows": [],
    "kvplan.scenario": ["kvplan.errors", "kvplan.trace_rows"],
    "kvplan.trace": [
        "kvplan.errors",
        "kvplan.inputs",
        "kvplan.scenario",
        "kvplan.trace_lines",
        "kvplan.trace_rows",
    ],
    "kvplan.workloads": ["kvplan.trace"],
    "kvplan.options": ["kvplan.errors", "kvplan.units"],
    "kvplan.python_repr": [],
    "kvplan.log_lines": [],
    "kvplan.startup_log": [
        "kvplan.errors",
        "kvplan.inputs",
        "kvplan.log_lines",
        "kvplan.options",
        "kvplan.python_repr",
    ],
    "kvplan.calibration": ["kvplan.errors", "kvplan.safe_yaml"],
    "kvplan.throughput_log": ["kvplan.errors"],
    "kvplan.measurements": ["kvplan.errors", "kvplan.inputs", "kvplan.throughput_log"],
    "kvplan.log_budget": ["kvplan.calibration", "kvplan.serving", "kvplan.startup_log"],
    "kvplan.likely_causes": [
        "kvplan.errors",
        "kvplan.log_budget",
        "kvplan.log_lines",
        "kvplan.options",
        "kvplan.serving",
        "kvplan.startup_log",
    ],
    "kvplan.shell": ["kvplan.errors", "kvplan.safe_yaml"],
    "kvplan.vllm_flags": [],
    "kvplan.vllm_start": ["kvplan.safe_yaml", "kvplan.shell"],
    "kvplan.vllm_command": [
        "kvplan.errors",
        "kvplan.options",
        "kvplan.safe_yaml",
        "kvplan.shell",
        "kvplan.units",
        "kvplan.vllm_flags",
        "kvplan.vllm_start",
    ],
    "kvplan.deployments": [
        "kvplan.errors",
        "kvplan.inputs",
        "kvplan.safe_yaml",
        "kvplan.shell",
        "kvplan.vllm_command",
        "kvplan.vllm_start",
    ],
    "kvplan.output": ["kvplan.errors"],
    "kvplan.timeline": ["kvplan.errors", "kvplan.output", "kvplan.plots"],
    # The types of a point of the timeline, which `kvplan.output` hands over, and of a row of `kernel-bench`.
    "kvplan.plots": ["kvplan.errors", "kvplan.jobs.kernel_bench", "kvplan.output"],
    "kvplan.step_time": ["kvplan.config", "kvplan.errors", "kvplan.serving"],
    "kvplan.topics.parts": ["kvplan.options"],
    "kvplan.topics.example": [
        "kvplan.cache_groups",
        "kvplan.config",
        "kvplan.errors",
        "kvplan.options",
        "kvplan.serving",
        "kvplan.topics.parts",
    ],
    "kvplan.cache_groups": ["kvplan.errors", "kvplan.serving"],
    "kvplan.request_rate": ["kvplan.errors", "kvplan.options", "kvplan.trace"],
    "kvplan.simulated_engines": ["kvplan.cache_groups", "kvplan.errors", "kvplan.options"],
    "kvplan.drawing": ["kvplan.topics.parts"],
    "kvplan.junit": ["kvplan.jobs.check", "kvplan.text"],
    "kvplan.report.tables": ["kvplan.options", "kvplan.text", "kvplan.units"],
    "kvplan.report.size": [
        "kvplan.jobs.size",
        "kvplan.options",
        "kvplan.report.tables",
        "kvplan.text",
        "kvplan.units",
    ],
    "kvplan.report.simulate": [
        "kvplan.jobs.min_blocks",
        "kvplan.jobs.simulate",
        "kvplan.report.tables",
        "kvplan.text",
        "kvplan.units",
    ],
    "kvplan.report.compare": [
        "kvplan.jobs.compare",
        "kvplan.jobs.simulate",
        "kvplan.report.tables",
        "kvplan.text",
        "kvplan.units",
    ],
    "kvplan.report.pool_map": ["kvplan.drawing", "kvplan.report.tables", "kvplan.text", "kvplan.units"],
    "kvplan.report.explain": [
        "kvplan.drawing",
        "kvplan.options",
        "kvplan.report.pool_map",
        "kvplan.report.tables",
        "kvplan.text",
        "kvplan.topics.parts",
        "kvplan.units",
    ],
    "kvplan.report.check": ["kvplan.jobs.check", "kvplan.report.tables", "kvplan.text"],
    "kvplan.report.audit": ["kvplan.jobs.audit", "kvplan.report.tables", "kvplan.text", "kvplan.units"],
    "kvplan.report.kernel_bench": [
        "kvplan.jobs.kernel_bench",
        "kvplan.report.tables",
        "kvplan.text",
        "kvplan.units",
    ],
    "kvplan.report.calibrate": [
        "kvplan.jobs.calibrate",
        "kvplan.report.tables",
        "kvplan.text",
        "kvplan.units",
    ],
    "kvplan.report.run_audit": [
        "kvplan.jobs.run_audit",
        "kvplan.report.tables",
        "kvplan.text",
        "kvplan.units",
    ],
    "kvplan.report.catalogues": ["kvplan.report.tables", "kvplan.text", "kvplan.units"],
}


@pytest.mark.parametrize("name", OUTER)
def test_a_module_outside_the_core_imports_what_it_is_allowed(name: str) -> None:
    assert {one for one in own(name) if not one.startswith("kvplan.core.")} <= set(OUTER[name])


KERNELS = [name for name in SOURCES if name.startswith("kvplan.kernels.")]
#: The one module of the kernels that knows the job: it fills in its result.
KERNEL_JOB = "kvplan.kernels.gpu_bench"


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_know_nothing_of_jobs_and_reports(name: str) -> None:
    allowed = {"kvplan.errors", "kvplan.config", "kvplan.units", "kvplan.core.gpu"}
    if name == KERNEL_JOB:
        allowed.add("kvplan.jobs.kernel_bench")
    assert {one for one in own(name) if one not in KERNELS} <= allowed


@pytest.mark.parametrize(
    "name", [name for name in SOURCES if name.startswith(("kvplan.jobs.", "kvplan.topics."))]
)
def test_a_job_neither_renders_nor_writes(name: str) -> None:
    forbidden = {"kvplan.drawing", "kvplan.output", "kvplan.junit", "kvplan.plots"}
    assert not own(name) & forbidden
    assert not any(one.startswith("kvplan.report") for one in imports(name))
    assert not called(name) & {"open", "print"}


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_prints_but_through_the_command_line_or_the_report(name: str) -> None:
    assert "print" not in called(name)
    text = SOURCES[name].read_text(encoding="utf-8")
    if not name.startswith("kvplan.cli"):
        assert "sys.stdout" not in text
        assert "sys.stderr" not in text


@pytest.mark.parametrize("name", SOURCES)
def test_no_module_changes_or_reads_random_state_of_the_process(name: str) -> None:
    assert "random" not in {
        alias.name for node in ast.walk(tree(name)) if isinstance(node, ast.Import) for alias in node.names
    }, "take random.Random(seed) by name"


def test_no_module_is_named_for_nothing() -> None:
    stems = {path.stem for path in SOURCES.values()}
    assert not stems & {"utils", "util", "common", "helpers", "misc", "base"}


def test_the_map_of_the_design_names_every_module() -> None:
    design = Path(__file__).parent.parent / "docs" / "design.md"
    rows = design.read_text(encoding="utf-8").partition("## Decisions")[0]
    named = {name.rstrip("/").rpartition("/")[2] for name in re.findall(r"`([\w./-]+)`", rows)}
    modules = [path for path in SOURCES.values() if not path.name.startswith("__")]
    missing = [path.name for path in modules if not {path.name, path.parent.name} & (named - {"kvplan"})]
    assert missing == []
