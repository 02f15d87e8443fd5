"""The table of engines that can be simulated: what each lacks, how long a sequence may be, samples as requests."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvplan.core.request import Request, Segment
from kvplan.errors import InputError
from kvplan.jobs.min_blocks import find_min_blocks, parse_goal
from kvplan.jobs.simulate import Simulation
from kvplan.options import ENGINES, SimulateOptions, parse_engine
from kvplan.simulated_engines import SIMULATED, check_engine_options, longest_sequence, one_request_a_sample

LACKING = [(engine, name, does) for engine, row in SIMULATED.items() for name, does in row.lacks.items()]


def options(**values: object) -> SimulateOptions:
    return SimulateOptions.of({"num_gpu_blocks_override": 600, "limit": 5, **values})


def test_the_table_names_engines_and_options_that_there_are() -> None:
    assert set(SIMULATED) <= set(ENGINES)
    assert {name for _, name, _ in LACKING} <= {item.name for item in fields(SimulateOptions)}


@pytest.mark.parametrize(("engine", "name", "does"), LACKING)
def test_what_an_engine_lacks_is_refused_unless_it_says_what_the_engine_does(
    engine: str, name: str, does: object
) -> None:
    other = {bool: True, int: 7, str: "last-come"}[type(does)] if does is not None else 5
    wanted = options(engine=engine)
    setattr(wanted, name, does)
    check_engine_options(wanted)
    setattr(wanted, name, other)
    with pytest.raises(InputError, match=f"is no setting of engine {engine}") as error:
        check_engine_options(wanted)
    others = [row for row in SIMULATED if name not in SIMULATED[row].lacks]
    assert error.value.hint == f"leave it out, or use engine {' or '.join(others)}"


@pytest.mark.parametrize("engine", SIMULATED)
def test_the_document_says_whose_rules_ran_and_what_the_engine_does(engine: str) -> None:
    result = Simulation("chat", options(engine=engine, max_model_len=4096)).run()
    row = SIMULATED[engine]
    assert result.simulation["scheduler_version"] == row.version
    assert result.simulation["verified"] == row.verified
    for name, does in row.lacks.items():
        if does is None:
            assert name not in result.config
        else:
            assert result.config[name][:2] == (does, f"as engine {engine} does")


@pytest.mark.parametrize(
    ("engine", "expected"),
    [("vllm", 99 * 16), ("paged", 1600), ("static", 1600), ("orca-max", 1024), ("orca-oracle", 1024)],
)
def test_the_longest_sequence_of_a_pool(engine: str, expected: int) -> None:
    assert longest_sequence(parse_engine(engine), 100, 16)[0] == expected


def test_samples_are_requests_with_a_prompt_in_common() -> None:
    one, two = Request("a", 0, 9, 3), Request("b", 5, 8, 2, samples=2)
    first, second, third = one_request_a_sample([one, two])
    assert first is one
    assert (second.id, third.id) == ("b#0", "b#1")
    assert second.content == third.content == (Segment("p:b", 0, 8),)
    assert second.samples == third.samples == 1


@pytest.mark.parametrize("order", [1, -1])
def test_names_of_samples_that_could_be_taken_are_refused(order: int) -> None:
    requests = [Request("b#0", 0, 9, 3), Request("b", 5, 8, 2, samples=2)][::order]
    with pytest.raises(InputError, match="ends in # and a number"):
        list(one_request_a_sample(requests))


def test_a_pool_that_turns_requests_away_meets_no_goal() -> None:
    """Engine paged starts with any pool: one that refuses requests preempts nobody, but serves fewer."""
    wanted = options(engine="paged", limit=30, max_model_len=16384)
    found = find_min_blocks("chat", wanted, parse_goal("0", "chat", "paged"))
    assert found.num_gpu_blocks is not None
    served = Simulation("chat", wanted, num_gpu_blocks=found.num_gpu_blocks).run()
    assert served.requests.rejected == 0
    assert served.preemptions.events == 0
    assert Simulation("chat", wanted, num_gpu_blocks=1).run().requests.rejected == 30
    assert found.num_gpu_blocks > 1
