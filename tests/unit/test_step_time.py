"""What a rank of a deployment does in a step, by hand, and which constants hold for it."""

from __future__ import annotations

import pytest

from kvplan.config import list_gpus, load_gpu, load_model
from kvplan.core.engine import StepWork
from kvplan.core.step_constants import (
    CONSTANT_NAMES,
    MEASURED_ERRORS,
    UNMEASURED,
    VLLM_GENERATIONS,
    StepConstants,
    launched_eagerly,
    vllm_generation,
)
from kvplan.core.step_shape import Attention, Experts, Matrices, Reductions
from kvplan.errors import InputError
from kvplan.options import Resolver, SizeOptions
from kvplan.serving import Served, find_gpu, serve
from kvplan.step_time import choose_constants, engine_costs, gpu_rates, latency_model, stage_shapes


def served(model: str, gpu: str = "h100-80gb", **options: object) -> Served:
    values = {"gpu": gpu, "gpu_memory": "4000GiB", "max_model_len": 2048, **options}
    found, count = find_gpu(gpu)
    return serve(load_model(model), Resolver(SizeOptions.of(values)), gpu=found, gpu_count=count)


# Shapes


def test_a_dense_model_reads_its_matrices_and_computes_two_flops_a_weight() -> None:
    (shape,) = stage_shapes(served("llama-3.1-8b"))
    # A layer: Q and O 4096 x 4096, K and V 1024 x 4096, three of 14336 x 4096; two norms of 4096, one at the end.
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
    assert shape.dense == Matrices(2 * (32 * (layer + 2 * 4096) + 4096), 2 * 32 * layer)
    assert shape.head == Matrices(2 * 128256 * 4096, 2 * 128256 * 4096)
    assert shape.experts == shape.reductions == ()
    # Keys and values of 8 heads of 128 in 2 bytes: 4096 a layer; 32 heads x 128 x 2 products x 2 FLOPs a pair.
    own = (32 + 8) * 256 * 2
    assert shape.attention == (Attention(32 * 4096, 32 * 16384, 32 * 16384, 32 * own),)
    # Norms and residual 8 x 4096; queries and keys twice 40 x 128; three of 14336.
    assert shape.activation_bytes == 32 * 2 * (8 * 4096 + 2 * 40 * 128 + 3 * 14336)
    assert shape.kernels == 32 * 11


def test_ranks_share_the_work_and_add_up_twice_a_layer() -> None:
    (one,) = stage_shapes(served("llama-3.1-8b"))
    (four,) = stage_shapes(served("llama-3.1-8b", tensor_parallel_size=4))
    assert four.dense.flops * 4 == one.dense.flops
    assert four.attention[0].context_bytes * 4 == one.attention[0].context_bytes
    # The embedding is added up too; 4096 elements of 2 bytes a token.
    assert four.reductions == (Reductions(33, 4, 8192), Reductions(32, 4, 8192))


def test_biased_results_take_kernels_of_their_own() -> None:
    # OPT: two residuals a layer that no norm adds, and two biases once ranks have added up.
    assert stage_shapes(served("opt-13b"))[0].kernels == 40 * (11 + 2)
    assert stage_shapes(served("opt-13b", tensor_parallel_size=2))[0].kernels == 40 * (11 + 4)
    # Qwen2 has biases of queries, keys and values, which its products add.
    assert stage_shapes(served("qwen2.5-7b"))[0].kernels == 28 * 11


def test_experts_are_apart_from_what_every_token_uses() -> None:
    (shape,) = stage_shapes(served("mixtral-8x7b", tensor_parallel_size=2))
    # An expert has three matrices of 14336 x 4096, of which a rank has half, in 32 layers.
    half = 32 * 3 * 14336 * 4096 // 2
    assert shape.experts == (Experts(8, 8, 2, 2 * half, 2 * half),)
    assert shape.kernels == 32 * 15


def test_expert_parallel_ranks_hold_some_of_the_experts_and_serve_all_replicas() -> None:
    case = served("mixtral-8x7b", data_parallel_size=4, enable_expert_parallel=True)
    (shape,) = stage_shapes(case)
    whole = 32 * 3 * 14336 * 4096
    assert shape.experts == (Experts(8, 2, 2, 2 * whole, 2 * whole, replicas=4),)
    # Attention is not shared; tokens of all replicas meet at the experts.
    assert shape.reductions == (Reductions(32, 4, 4 * 8192),)


def test_8_bit_products_have_8_bit_operands_and_4_bit_weights_have_not() -> None:
    (shape,) = stage_shapes(served("llama-3.1-8b", quantization="fp8"))
    assert shape.dense.flops == 0
    assert shape.dense.flops_8bit == 2 * 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    assert shape.head.flops_8bit == 0
    (shape,) = stage_shapes(served("llama-3.1-8b", quantization="bitsandbytes"))
    assert shape.dense.flops > 0
    assert shape.dense.flops_8bit == 0


def test_latent_attention_decodes_with_the_latent_and_expands_it_for_prompts() -> None:
    (shape,) = stage_shapes(served("deepseek-v3", tensor_parallel_size=8))
    (kind,) = shape.attention
    # 16 heads a rank: (512 + 64) + 512 elements with the latent; 192 + 128 with keys and values. 576 x 2 bytes a token.
    assert kind == Attention(
        61 * 1152, 61 * 2 * 16 * 1088, 61 * 2 * 16 * 320, 61 * 16 * (2 * 192 + 2 * 128) * 2
    )
    assert shape.experts[0][:3] == (256, 256, 8)


def test_an_indexer_has_all_its_keys_read_and_some_of_the_latents() -> None:
    (shape,) = stage_shapes(served("deepseek-v3.2", tensor_parallel_size=8))
    found = {kind.window: kind.context_bytes for kind in shape.attention}
    # 128 fp8 numbers and a scale; of latents, which are packed on this GPU, at most 2,048.
    assert found[None] == 61 * 132
    assert set(found) == {None, 2048}


def test_windows_and_states_are_kinds_of_their_own() -> None:
    (shape,) = stage_shapes(served("gemma-3-27b"))
    assert {kind.window for kind in shape.attention} == {None, 1024}
    (shape,) = stage_shapes(served("qwen3-next-80b-a3b"))
    states = [kind for kind in shape.attention if kind.sequence_bytes]
    assert [(kind.context_bytes, kind.pair_flops) for kind in states] == [(0, 0)]
    (shape,) = stage_shapes(served("llama-4-scout", tensor_parallel_size=8))
    assert {kind.window for kind in shape.attention} == {None, 8192}


def test_without_rates_or_weights_a_step_time_is_asked_for() -> None:
    with pytest.raises(InputError, match="the GPU's bandwidth and FLOP/s are not known") as caught:
        latency_model(served("llama-3.1-8b", "gb10"))
    assert caught.value.hint == "name another GPU with --gpu, or simulate with --step-time"
    with pytest.raises(InputError, match="bandwidth"):
        gpu_rates(None)


def test_a_gpu_without_8_bit_rates_computes_in_16_bits() -> None:
    rates = gpu_rates(load_gpu("a100-80gb"))
    assert rates.flops_8bit == rates.flops_16bit == 312 * 10**12
    assert rates.link == (300 * 10**9, True)
    assert gpu_rates(load_gpu("l40s")).link.is_switched is False


# Constants


def test_the_constants_of_a_gpu_are_its_own_and_those_of_the_one_it_is_like() -> None:
    newest = VLLM_GENERATIONS[0]
    h100, h200 = load_gpu("h100-80gb").kernels, load_gpu("h200").kernels
    assert h100 is not None
    assert h200 is not None
    found = choose_constants(load_gpu("h200"), newest)
    assert found.constants.kv_bandwidth_share == h200.kv_bandwidth_share != h100.kv_bandwidth_share
    assert found.constants.weights_bandwidth_share == h100.weights_bandwidth_share
    assert found.name == "shipped constants: h200 as of h100-80gb; vLLM with asynchronous scheduling"
    assert found.measured_error is None
    own = choose_constants(load_gpu("h100-80gb"), newest)
    assert own.name == "shipped constants: h100-80gb; vLLM with asynchronous scheduling"
    assert own.measured_error == MEASURED_ERRORS["h100-80gb", newest.name]


def test_a_gpu_that_nothing_was_measured_on_gets_the_middle() -> None:
    found = choose_constants(load_gpu("mi300x"), VLLM_GENERATIONS[0])
    assert found.name == "shipped constants: mi300x, not measured; vLLM with asynchronous scheduling"
    assert found.constants.weights_bandwidth_share == UNMEASURED["weights_bandwidth_share"]


def test_every_gpu_that_lends_is_in_the_catalogue_and_has_something_to_lend() -> None:
    for gpu in list_gpus():
        if gpu.kernels_like is not None:
            found = choose_constants(gpu, VLLM_GENERATIONS[0])
            assert "not measured" not in found.name, gpu.name
    assert {gpu for gpu, _ in MEASURED_ERRORS} <= {gpu.name for gpu in list_gpus()}


@pytest.mark.parametrize(
    ("number", "is_async", "name"),
    [
        ((0, 33), True, "vLLM with asynchronous scheduling"),
        ((0, 33), False, "vLLM V1 without asynchronous scheduling"),
        ((0, 11), False, "vLLM V1 without asynchronous scheduling"),
        ((0, 11), True, "vLLM with asynchronous scheduling"),
        ((0, 7), False, "vLLM V0"),
        ((0, 3), False, "vLLM of 2023-24"),
    ],
)
def test_generations_follow_the_version_and_how_it_schedules(
    number: tuple[int, int], is_async: bool, name: str
) -> None:
    assert vllm_generation(number, async_scheduling=is_async).name == name


def test_the_oldest_generation_ran_on_slower_hosts_beside_a100s() -> None:
    slow, fast = (vllm_generation((0, 3), architecture=name) for name in ("Ampere", "Hopper"))
    assert slow.launch_kernel_s > fast.launch_kernel_s
    assert slow.name == fast.name


def test_other_engines_are_taken_for_the_newest_vllm() -> None:
    assert engine_costs(served("llama-3.1-8b", engine="sglang")).name == VLLM_GENERATIONS[0].name
    assert engine_costs(served("llama-3.1-8b", engine="vllm@0.11")).overlaps_host is False


def test_eager_steps_wait_for_their_launches() -> None:
    graphs, _ = latency_model(served("llama-3.1-8b", tensor_parallel_size=8))
    eager, _ = latency_model(served("llama-3.1-8b", tensor_parallel_size=8, enforce_eager=True))
    work = StepWork(1, 100, sampled=1)
    # 352 kernels of 23.9 us each.
    assert eager.step_ps(work) == 352 * 23_900_000 > graphs.step_ps(work)
    oldest = VLLM_GENERATIONS[-1]
    assert launched_eagerly(oldest) is oldest


def test_coefficients_are_seconds_and_inverse_shares() -> None:
    constants = StepConstants(weights_bandwidth_share=0.5, kernel_s=3e-6)
    found = constants.coefficients()
    assert (found["weights_bandwidth_share"], found["kernel_s"]) == (2.0, 3e-6)
    assert constants.with_coefficients(found) == constants
    assert set(StepConstants().coefficients().values()) == {0.0, 1.0}
    assert len(found) == len(CONSTANT_NAMES)
