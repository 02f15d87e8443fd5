"""What `size` prints: the answer, where the memory goes, and comparisons of models, engines and GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from kvplan.report.tables import Screen, exact_bytes, gib, new_table
from kvplan.text import literal
from kvplan.units import counted, format_bytes, format_count, format_share

if TYPE_CHECKING:
    from kvplan.core.sizing import Capacity, Rank
    from kvplan.jobs.size import SizeResult
    from kvplan.options import Settings


#: Results that have room as columns beside each other; more are rows.
_MOST_BESIDE = 3
#: Characters of the longest bar, and of the narrowest terminal that has room for it.
_BAR = 24
_NARROWEST_BAR = 72


def print_size(screen: Screen, results: Sequence[SizeResult], *, explain: bool) -> None:
    """The answer first, then where the memory goes; one result in detail, or several beside each other."""
    for line in dict.fromkeys(_assumptions(result.config) for result in results):
        screen.say(line, style="dim")
    if len(results) > _MOST_BESIDE:
        _compared(screen, results)
    else:
        for result in results:
            _answer(screen, result, results)
        if len(results) == 1 and results[0].capacity is not None:
            _memory(screen, results[0])
        _facts(screen, results)
    for result in results if len(results) <= _MOST_BESIDE or explain else ():
        _ranks(screen, result)
        _groups(screen, result)
        if explain:
            screen.console.print()
            for line in result.explanation:
                screen.say(f"  {line}")


def print_gpu_ranking(screen: Screen, results: Sequence[SizeResult]) -> None:
    """One model on several GPUs: on as many of each as it needs, the fewest first."""
    first = results[0]
    screen.say(_assumptions(first.config, but=("tensor_parallel_size",)), style="dim")
    screen.console.print()
    what = _sequences(first.concurrency, first.seq)
    started = first.config["max_model_len"].value
    if isinstance(started, int) and started > first.seq:  # what a small GPU may fail at
        what += f", started with max_model_len {started:,}"
    fitting = [result for result in results if result.capacity is not None and result.capacity.fits]
    screen.say(f"How many GPUs {literal(first.model.name)} needs for {what}", style="bold")
    if not fitting:
        screen.say("None of these fits.")
    table = new_table("GPUs", "in all", "fits", "KV tokens", "sequences", "headroom")
    for result in results:
        capacity, gpu = result.capacity, result.gpu
        assert capacity is not None, "ranked results have a budget"
        assert gpu is not None, "ranked results name a GPU"
        table.add_row(
            f"{gpu.count} x {gpu.name}{_degrees(result)}",
            format_bytes(gpu.count * gpu.memory_bytes),
            f"{'yes' if capacity.fits else 'no'}, {capacity.fits_confidence}",
            format_count(capacity.kv_cache_tokens),
            format_count(capacity.concurrent_sequences),
            format_share(capacity.headroom_share),
        )
    screen.show(table)
    for result in results:
        _changes(screen, result, f"{result.gpu.count} x {result.gpu.name}" if result.gpu else "")


def _answer(screen: Screen, result: SizeResult, results: Sequence[SizeResult]) -> None:
    """Does it fit, how many at once, what limits it, what would change it."""
    screen.console.print()
    capacity, kv, name = result.capacity, result.kv, literal(result.model.name)
    if _has_several_engines(results):
        name += f" by {literal(result.config['engine'].value)}"
    if capacity is None:
        weights = result.weights.total_bytes
        takes = "takes" if result.concurrency == 1 else "take"
        screen.say(
            f"{name}: {_sequences(result.concurrency, result.seq)} {takes} {format_bytes(kv.total_bytes)} of KV",
            style="bold",
        )
        screen.say(f"Weights: {format_bytes(weights)}")
        screen.say("Whether it fits: --gpu NAME, or --gpu all to compare (kvplan gpus lists them)")
        return
    gpu = result.gpu
    where = f" on {gpu.count} x {gpu.name}" if gpu is not None else ""
    verdict, sure = "fits" if capacity.fits else "does not fit", capacity.fits_confidence
    screen.say(
        f"{name} {verdict}{where}{'' if sure == 'exact' else f', {sure}'}",
        style="bold green" if capacity.fits else "bold red",
    )
    if sure == "uncertain" and capacity.overhead_bytes is not None:
        low, high = capacity.overhead_bytes.low, capacity.overhead_bytes.high
        why = f"at one end it {'does not fit' if capacity.fits else 'fits'}"
        if capacity.overhead_is_guess:
            why = "that is a guess; --kv-cache-memory-bytes from the engine's log makes it exact"
        screen.say(f"Uncertain: the overhead is {gib(low)} to {gib(high)} GiB, and {why}")
    screen.say(f"At once: {_at_once(result)}")
    if capacity.fits:
        screen.say(f"Asked for: {capacity.reason}{_of_replica(result)}")
    screen.say(f"Limit: {_limit(result)}")
    if capacity.suggestions:
        _changes(screen, result, "")
    elif capacity.fits and "suggest" in result.config:
        screen.say("No change of one setting lets more in")
    elif capacity.fits:
        screen.say("More: --suggest shows what each change would bring")
    else:
        screen.say("No change of one or two settings makes it fit")


def _changes(screen: Screen, result: SizeResult, where: str) -> None:
    if result.capacity is None or not result.capacity.suggestions:
        return
    table = new_table("what would make it fit" if not result.capacity.fits else "what would let more in", "")
    table.columns[1].justify = "left"
    for suggestion in result.capacity.suggestions:
        table.add_row(literal(suggestion.change), literal(suggestion.effect))
    if where:
        screen.say(where)
    screen.show(table)


def _memory(screen: Screen, result: SizeResult) -> None:
    """Where the memory of the limiting GPU goes."""
    capacity, gpu = result.capacity, result.gpu
    if capacity is None or gpu is None or capacity.overhead_bytes is None:
        return
    overhead = capacity.overhead_bytes
    rank = capacity.ranks[capacity.limiting_rank]
    free = capacity.headroom_bytes
    if capacity.available_kv_bytes < 0:  # what is there is less than nothing
        free = capacity.available_kv_bytes - capacity.taken_kv_bytes
    parts = [
        ("weights", rank.weights_bytes or 0, ""),
        (
            f"overhead, {capacity.overhead_source}",
            rank.overhead_bytes or 0,
            f"{gib(overhead.low)} to {gib(overhead.high)}",
        ),
        (
            f"KV of {counted(result.concurrency, 'sequence')}",
            capacity.taken_kv_bytes,
            "",
        ),
        ("KV, free" if free >= 0 else "KV, lacking", free, ""),
        ("left to others", capacity.unused_bytes or 0, ""),
    ]
    table = new_table("memory of each GPU", "GiB", "", "from - to")
    table.columns[2].justify = "left"
    table.columns[2].no_wrap = True
    table.columns[3].justify = "left"
    mark = "█" if screen.console.encoding.startswith("utf") else "#"
    if rank.extra_bytes > 5 << 20:  # less would show as 0.00
        parts.insert(1, ("rotary tables, LoRA", rank.extra_bytes, ""))
    whole = max(gpu.memory_bytes, sum(size for _, size, _ in parts if size > 0))
    for label, size, note in (*parts, ("in all", gpu.memory_bytes, "")):
        bar = mark * (max(0, round(size / whole * _BAR)) if screen.console.width >= _NARROWEST_BAR else 0)
        table.add_row(label, gib(size), Text(bar, style="cyan"), note)
    screen.show(table)


def _facts(screen: Screen, results: Sequence[SizeResult]) -> None:
    """Figures of each result in a column; what only some have is a dash in the others."""
    columns = [dict(_size_rows(result, alone=len(results) == 1)) for result in results]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    table = new_table("", *(literal(_title(result, results)) for result in results))
    for label in labels:
        table.add_row(label, *(column.get(label, "-") for column in columns))
    screen.show(table)


def _compared(screen: Screen, results: Sequence[SizeResult]) -> None:
    """A row for each result, and below the table why some do not fit."""
    first = results[0]
    screen.console.print()
    screen.say(f"{_sequences(first.concurrency, first.seq)}, in GiB; KV of a token in KiB", style="bold")
    has_budget = any(result.capacity is not None for result in results)
    budget = ("for KV", "tokens", "at once", "fits") if has_budget else ()
    table = new_table("", "KV a token", "KV", "weights", *budget, keep_first=True)
    table.columns[-1].no_wrap = True
    for result in results:
        kv = result.kv
        table.add_row(
            literal(_title(result, results)),
            f"{kv.bytes_per_token / 1024:,.2f}",
            gib(kv.total_bytes),
            gib(result.weights.total_bytes),
            *(_capacity_cells(result.capacity) if has_budget else ()),
        )
    screen.show(table)
    for result in results:
        if result.capacity is not None and not result.capacity.fits:
            screen.say(f"{literal(_title(result, results))} does not fit: {_limit(result)}")


def _ranks(screen: Screen, result: SizeResult) -> None:
    """The stages of a pipeline, and what ranks hold that others hold too."""
    capacity = result.capacity
    if capacity is None:
        return
    replicated = any(_is_replicated(rank) for rank in capacity.ranks)
    if len(capacity.ranks) == 1 and not replicated:
        return
    table = new_table("GPUs of stage", "layers", "weights, GiB", "KV B/token", "block, B", "blocks")
    for rank in capacity.ranks:
        limits = " (limits)" if rank.stage == capacity.limiting_rank and len(capacity.ranks) > 1 else ""
        table.add_row(
            f"{rank.stage}{limits}",
            str(rank.layers),
            gib(rank.weights_bytes),
            f"{rank.bytes_per_token:,}",
            f"{rank.bytes_per_block:,}",
            f"{rank.num_blocks:,}",
        )
        if replicated:
            table.add_row(
                "  of it replicated",
                "",
                gib(rank.replicated_weights_bytes),
                f"{rank.replicated_bytes_per_token:,}",
            )
    screen.show(table)


def _groups(screen: Screen, result: SizeResult) -> None:
    """Groups of layers with block tables of their own, where there are several."""
    groups = result.kv.groups
    if len(groups) < 2 and all(group.padded_layers == group.layers for group in groups):
        return
    table = new_table("KV cache groups", "layers", "padding", "block", "page, B", "blocks")
    for group, count in Counter(groups).items():
        table.add_row(
            f"{count} x {literal(group.kind)}" if count > 1 else literal(group.kind),
            str(group.layers),
            str(group.padded_layers - group.layers),
            f"{group.block_size:,}",
            "several" if group.page_bytes is None else f"{group.page_bytes:,}",
            f"{group.blocks_per_sequence:,}",
        )
    screen.show(table)


def _assumptions(settings: Settings, *, but: Collection[str] = ()) -> str:
    """The engine and the settings that decide bytes; those that nobody gave are said to be assumed."""
    names = [
        "engine",
        "dtype",
        "kv_cache_dtype",
        "block_size",
        "tensor_parallel_size",
        "gpu_memory_utilization",
    ]
    if settings["tensor_parallel_size"].value == 1:
        names.remove("tensor_parallel_size")  # the answer says how many GPUs there are
    if "gpu" not in settings:
        names.remove("gpu_memory_utilization")
    names = [name for name in names if name not in but]
    given = [f"{n} {literal(settings[n].value)}" for n in names if settings[n].given]
    assumed = [f"{n} {literal(settings[n].value)}" for n in names if not settings[n].given]
    if "overhead" in settings:
        given.append(
            f"overhead {literal(settings['overhead'].value)} ({literal(settings['overhead'].source)})"
        )
    return "; ".join([*given, f"assumed: {', '.join(assumed)}"] if assumed else given)


def _sequences(count: int, tokens: int) -> str:
    return f"{counted(count, 'sequence')} of {counted(tokens, 'token')}"


def _has_several_engines(results: Sequence[SizeResult]) -> bool:
    return len({result.config["engine"].value for result in results}) > 1


def _title(result: SizeResult, results: Sequence[SizeResult]) -> str:
    """What tells a result from those beside it: the model, the engine or both."""
    engine = str(result.config["engine"].value)
    if not _has_several_engines(results):
        return result.model.name
    several_models = len({r.model.name for r in results}) > 1
    return f"{result.model.name} {engine}" if several_models else engine


def _degrees(result: SizeResult) -> str:
    names = {"tensor_parallel_size": "TP", "pipeline_parallel_size": "PP", "data_parallel_size": "DP"}
    sizes = {short: result.config[name].value for name, short in names.items()}
    several = [f"{short} {size}" for short, size in sizes.items() if size != 1]
    return f" ({', '.join(several)})" if several else ""


def _at_once(result: SizeResult) -> str:
    """How many sequences are resident, of the length asked for and of a distribution."""
    capacity = result.capacity
    assert capacity is not None, "asked of results with a budget"
    found, count = capacity.distribution, capacity.concurrent_sequences
    text = _sequences(count, result.seq) if count else f"no sequence of {counted(result.seq, 'token')}"
    text += _of_replica(result)
    if found is None:
        return text
    return (
        f"{counted(found.concurrent_mean, 'sequence')} of the lengths given on average, "
        f"{found.concurrent_p95:,} with 95 % confidence; {text}"
    )


def _of_replica(result: SizeResult) -> str:
    """Counts are those of one replica, where there are several."""
    replicas = result.config["data_parallel_size"].value
    return f", in each of {replicas:,} replicas" if isinstance(replicas, int) and replicas > 1 else ""


def _limit(result: SizeResult) -> str:
    """What stands in the way, or what runs out first."""
    capacity = result.capacity
    assert capacity is not None, "asked of results with a budget"
    rank = capacity.ranks[capacity.limiting_rank]
    stage = (
        f" of stage {capacity.limiting_rank} (the one with the fewest blocks)"
        if len(capacity.ranks) > 1
        else ""
    )
    if capacity.overhead_bytes is not None and capacity.available_kv_bytes < 0:
        return (
            f"weights of {format_bytes(rank.weights_bytes)} and overhead of about "
            f"{format_bytes(rank.overhead_bytes)} on each GPU{stage} leave nothing for KV"
        )
    if not capacity.fits:
        return capacity.reason + stage
    seqs = result.config["max_num_seqs"].value
    if isinstance(seqs, int) and seqs < capacity.concurrent_sequences:
        return f"max_num_seqs {seqs:,}: the KV memory would hold more"
    return (
        f"{format_bytes(capacity.available_kv_bytes)} for KV on each GPU{stage}, "
        f"{counted(capacity.kv_cache_tokens, 'token')} as the engine counts"
    )


def _is_replicated(rank: Rank) -> bool:
    """Whether other ranks hold KV of this one too, or weights worth a word: norms always are."""
    weights = rank.weights_bytes or 0
    return rank.replicated_bytes_per_token > 0 or (rank.replicated_weights_bytes or 0) * 100 > weights


def _capacity_cells(capacity: Capacity | None) -> tuple[str, str, str, str]:
    """Memory for KV, its tokens, sequences at once and the verdict."""
    if capacity is None:
        return "-", "-", "-", "-"
    return (
        gib(capacity.available_kv_bytes),
        format_count(capacity.kv_cache_tokens),
        format_count(capacity.concurrent_sequences),
        f"{'yes' if capacity.fits else 'no'}, {capacity.fits_confidence}",
    )


def _size_rows(result: SizeResult, *, alone: bool) -> list[tuple[str, str]]:
    kv, weights, capacity, gpu = result.kv, result.weights, result.capacity, result.gpu
    rows = [
        ("KV per token", exact_bytes(kv.bytes_per_token)),
        ("KV per block", exact_bytes(kv.bytes_per_block)),
        ("tokens in a block", f"{kv.block_size:,}"),
    ]
    if kv.fixed_bytes_per_sequence:
        rows.append(("fixed KV of a sequence", exact_bytes(kv.fixed_bytes_per_sequence)))
    rows += [
        (f"KV of {counted(result.seq, 'token')}", exact_bytes(kv.bytes_per_sequence)),
    ]
    if kv.allocated_bytes_per_sequence != kv.bytes_per_sequence:
        rows.append(("  in whole blocks", exact_bytes(kv.allocated_bytes_per_sequence)))
    if result.concurrency > 1:
        rows.append((f"KV of {result.concurrency:,} sequences", exact_bytes(kv.total_bytes)))
    rows += [
        ("parameters", "unknown" if weights.parameters is None else format_count(weights.parameters)),
        ("weights", exact_bytes(weights.total_bytes) if alone else format_bytes(weights.total_bytes)),
    ]
    if kv.per_gpu.bytes_per_token != kv.bytes_per_token or kv.cluster_bytes_per_token != kv.bytes_per_token:
        rows += [
            ("per GPU: KV per block", exact_bytes(kv.per_gpu.bytes_per_block)),
            ("per GPU: weights", exact_bytes(weights.per_gpu_bytes)),
        ]
    if capacity is None:
        return rows
    if gpu is not None and not alone:
        rows.append(("GPU", f"{gpu.count} x {gpu.name}, {format_bytes(gpu.memory_bytes)}"))
    if capacity.overhead_bytes is not None and not alone:
        low, high = capacity.overhead_bytes.low, capacity.overhead_bytes.high
        source = str(capacity.overhead_source).replace("estimated", "est.")
        rows.append((f"overhead, {source}", f"{format_bytes(low)} to {format_bytes(high)}"))
    share = [] if capacity.headroom_share is None else [format_share(capacity.headroom_share)]
    rows.append(("memory for KV", format_bytes(capacity.available_kv_bytes)))
    if capacity.num_gpu_blocks:
        rows += [
            ("blocks", f"{capacity.num_gpu_blocks:,}, {capacity.usable_blocks:,} usable"),
            (
                "the engine prints",
                f"{counted(capacity.kv_cache_tokens, 'token')}, {capacity.max_concurrency:.2f}x",
            ),
            ("  at max_model_len", f"{capacity.max_model_len:,}"),
            ("sequences at once", format_count(capacity.concurrent_sequences)),
            ("headroom", ", ".join([format_bytes(capacity.headroom_bytes), *share])),
            ("longest that fits", counted(capacity.max_model_len_that_fits, "token")),
        ]
    found = capacity.distribution
    if found is not None:
        rows += [
            (
                f"lengths, {found.method}",
                f"mean {found.mean_tokens:,.0f}, p95 {found.p95_tokens:,.0f} tokens",
            ),
            ("  blocks of a sequence", f"{found.blocks_mean:,.1f}, {found.shared_blocks:,.1f} shared"),
            (
                "  at once",
                f"{found.concurrent_mean:,} on average, {found.concurrent_p95:,} with 95 % conf.",
            ),
        ]
    return rows
