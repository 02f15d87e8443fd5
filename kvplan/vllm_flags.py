"""What each flag and environment variable of ``vllm serve`` means for memory: data, and looking a flag up.

Read from engine/arg_utils.py, entrypoints/*/cli_args.py and envs.py of vLLM 0.8.5 to 0.33.0; a test holds the table
against these files where they are at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Flag(NamedTuple):
    """A flag, by its long name.

    ``form`` says what follows it: ``switch`` nothing, ``value`` one word, ``optional`` one word or none, ``many`` words
    up to the next flag, ``json`` one word that is JSON, with dotted forms beside it. ``effect`` is what kvplan does
    with it: ``option`` sets ``target``, ``harmless`` changes no memory on the GPU, ``scheduling`` changes a run but no
    size, ``memory`` may change memory in a way that is not modelled, unless its value is one of ``neutral``; ``model``
    and ``config`` name a model and a file of flags, ``read`` is JSON of which kvplan reads what matters.
    """

    name: str
    form: str
    effect: str
    target: str = ""
    neutral: frozenset[str] = frozenset()


class Meaning(NamedTuple):
    """A flag as it was written: which one, and for a switch whether it turns its feature on."""

    flag: Flag
    on: bool


#: Flags that become options of kvplan: name, form, option.
_OPTIONS = """
--tensor-parallel-size           value   tensor_parallel_size
--pipeline-parallel-size         value   pipeline_parallel_size
--data-parallel-size             value   data_parallel_size
--decode-context-parallel-size   value   decode_context_parallel_size
--enable-expert-parallel         switch  enable_expert_parallel
--dtype                          value   dtype
--quantization                   value   quantization
--kv-cache-dtype                 value   kv_cache_dtype
--mamba-cache-dtype              value   mamba_cache_dtype
--mamba-ssm-cache-dtype          value   mamba_ssm_cache_dtype
--block-size                     value   block_size
--gpu-memory-utilization         value   gpu_memory_utilization
--kv-cache-memory-bytes          value   kv_cache_memory_bytes
--num-gpu-blocks-override        value   num_gpu_blocks_override
--max-model-len                  value   max_model_len
--max-num-seqs                   value   max_num_seqs
--max-num-batched-tokens         value   max_num_batched_tokens
--long-prefill-token-threshold   value   long_prefill_token_threshold
--scheduling-policy              value   scheduling_policy
--enforce-eager                  switch  enforce_eager
--enable-prefix-caching          switch  enable_prefix_caching
--enable-chunked-prefill         switch  enable_chunked_prefill
--disable-hybrid-kv-cache-manager switch disable_hybrid_kv_cache_manager
--async-scheduling               switch  async_scheduling
--enable-lora                    switch  enable_lora
--max-loras                      value   max_loras
--max-lora-rank                  value   max_lora_rank
--spec-method                    value   speculative_method
--spec-model                     value   speculative_model
--spec-tokens                    value   num_speculative_tokens
--speculative-model              value   speculative_model
--num-speculative-tokens         value   num_speculative_tokens
"""

#: JSON of which some keys become options; kvplan/vllm_command.py knows which.
_READ = """
--speculative-config   json
--compilation-config   json
--hf-overrides         json
--rope-scaling         json
--optimization-level   value
"""

#: Flags that may change memory in a way that is not modelled, and after = the values that change nothing.
_MEMORY = """
--runner value = auto generate
--task value = auto generate
--convert value = auto none
--hf-config-path value
--quantization-config json
--enable-return-routed-experts switch
--return-sampling-mask switch
--use-fp64-gumbel switch
--enable-trace-replay switch
--disable-sliding-window switch
--enable-prompt-embeds switch
--model-class-overrides json
--pooler-config json
--override-pooler-config json
--enable-sleep-mode switch
--enable-cumem-allocator switch
--model-impl value = auto vllm
--logits-processors many
--load-format value = auto pt safetensors npcache dummy tensorizer runai_streamer runai_streamer_sharded
    sharded_state gguf mistral fastsafetensors instanttensor
--attention-backend value = auto FLASH_ATTN
--override-attention-dtype value
--dcp-q-replicate switch
--dcp-kv-cache-interleave-size value = 1
--cp-kv-cache-interleave-size value = 1
--prefill-context-parallel-size value = 1
--enable-hc-sp switch
--enable-batch-sharded-sampling switch
--all2all-backend value = allgather_reducescatter naive
--enable-dbo switch
--ubatch-size value = 0
--enable-elastic-ep switch
--elastic-ep-max-dp-size value
--enable-eplb switch
--eplb-config json
--num-redundant-experts value = 0
--worker-cls value = auto
--worker-extension-cls value
--kv-cache-dtype-skip-layers many
--kv-sharing-fast-prefill switch
--swa-bounded-replay switch = on
--mamba-block-size value
--mamba-cache-mode value = none
--enable-mamba-shared-prefix-checkpoint switch
--replayssm-buffer-len value
--use-replayssm switch
--kv-offloading-size value = 0
--cpu-offload-gb value = 0
--cpu-offload-params many
--offload-backend value = auto
--offload-group-size value = 0
--language-model-only switch
--limit-mm-per-prompt json
--enable-mm-embeds switch
--mm-processor-kwargs json
--mm-encoder-only switch
--mm-encoder-tp-mode value = weights
--mm-encoder-attn-backend value
--mm-encoder-attn-dtype value
--enable-multimodal-encoder-data-parallel switch
--skip-mm-profiling switch
--video-pruning-rate value = 0
--mm-processor-device value = auto cpu
--mm-ipc-gpu-memory-gb value = 0
--lora-dtype value = auto
--enable-tower-connector-lora switch
--fully-sharded-loras switch
--lora-target-modules many
--specialize-active-lora switch
--enable-mixed-moe-lora-format switch
--enable-moe-shared-loras switch
--max-lora-cls-labels value
--enable-lora-bias switch
--lora-extra-vocab-size value = 0
--long-lora-scaling-factors many
--qlora-adapter-name-or-path value
--enable-prompt-adapter switch
--cudagraph-capture-sizes many
--max-cudagraph-capture-size value
--cuda-graph-sizes many
--num-lookahead-slots value = 0
--performance-mode value = balanced
--monokernel switch
--moe-backend value = auto
--linear-backend value = auto
--diffusion-config json
--kv-transfer-config json
--ec-transfer-config json
--ec-manager-config json
--attention-config json
--engram-config json
--kernel-config json
--additional-config json
--aux-output-config json
--weight-transfer-config json
--override-neuron-config json
--device value = auto cuda
--speculative-draft-tensor-parallel-size value
"""

#: Flags that change what a run does, and no size.
_SCHEDULING = """
--max-num-scheduled-tokens value
--max-num-active-seqs value
--long-prefill-token-threshold-adaptive switch
--disable-chunked-mm-input switch
--scheduler-cls value
--scheduler-reserve-full-isl switch = on
--watermark value = 0
--prefill-schedule-interval value
--prefix-match-unit value
--prefix-cache-retention-interval value = 0
--max-num-partial-prefills value = 1
--max-long-partial-prefills value = 1
--scheduler-delay-factor value = 0
--preemption-mode value = recompute
--num-scheduler-steps value = 1
--multi-step-stream-outputs switch = on
--max-num-queued-reqs value
--max-num-queued-tokens value
"""

#: Flags that leave the memory of the GPU as it is: of the server, of loading, of logging, of host memory; and choices
#: of kernels whose workspace lies within the range of the estimates.
_HARMLESS = """
--tokenizer value
--tokenizer-mode value
--tokenizer-revision value
--trust-remote-code switch
--seed value
--allowed-local-media-path value
--allowed-media-domains many
--revision value
--code-revision value
--allow-deprecated-quantization switch
--max-logprobs value
--logprobs-mode value
--disable-cascade-attn switch
--skip-tokenizer-init switch
--served-model-name many
--config-format value
--hf-token optional
--rope-theta value
--generation-config value
--override-generation-config json
--sleep-mode-backend value
--sleep-mode-offload-cudagraph switch
--sleep-preserve-parameter-names many
--enable-nccl-comm-suspend switch
--io-processor-plugin value
--logits-processor-pattern value
--renderer-num-workers value
--download-dir value
--safetensors-load-strategy value
--safetensors-prefetch-num-threads value
--safetensors-prefetch-block-size value
--model-loader-extra-config json
--ignore-patterns many
--use-tqdm-on-load switch
--pt-load-map-location json
--mamba-backend value
--mamba-ssu-algorithm value
--enable-mamba-cache-stochastic-rounding switch
--mamba-cache-philox-rounds value
--reasoning-parser value
--reasoning-parser-plugin value
--enable-reasoning switch
--distributed-executor-backend value
--worker-use-ray switch
--master-addr value
--master-port value
--nnodes value
--node-rank value
--distributed-timeout-seconds value
--cpu-distributed-timeout-seconds value
--numa-bind switch
--numa-bind-nodes many
--numa-bind-cpus many
--device-ids value
--dcp-comm-backend value
--data-parallel-rank value
--data-parallel-start-rank value
--data-parallel-size-local value
--data-parallel-address value
--data-parallel-rpc-port value
--data-parallel-backend value
--data-parallel-hybrid-lb switch
--data-parallel-external-lb switch
--data-parallel-multi-port-external-lb switch
--enable-ep-weight-filter switch
--enable-shm-tensor-arena switch
--dbo-decode-token-threshold value
--dbo-prefill-token-threshold value
--dp-sync-interval value
--disable-nccl-for-dp-synchronization switch
--expert-placement-strategy value
--eplb-window-size value
--eplb-step-interval value
--eplb-log-balancedness switch
--max-parallel-loading-workers value
--ray-workers-use-nsight switch
--disable-custom-all-reduce switch
--enable-fault-tolerance switch
--fault-tolerance-config json
--prefix-caching-hash-algo value
--calculate-kv-scales switch
--kv-offloading-backend value
--swap-space value
--offload-num-in-group value
--offload-prefetch-step value
--offload-params many
--media-io-kwargs json
--mm-processor-cache-gb value
--mm-processor-cache-type value
--mm-hasher-algorithm value
--mm-shm-cache-max-object-size-mb value
--mm-encoder-fp8-scale-path value
--mm-encoder-fp8-scale-save-path value
--mm-encoder-fp8-scale-save-margin value
--interleave-mm-strings switch
--video-pruning-method value
--mm-tensor-ipc value
--mm-device-do-normalize switch
--disable-mm-preprocessor-cache switch
--max-cpu-loras value
--default-mm-loras json
--lora-modules many
--max-prompt-adapters value
--max-prompt-adapter-token value
--prompt-adapters many
--logging-config json
--log-level value
--log-config-file value
--show-hidden-metrics-for-version value
--otlp-traces-endpoint value
--collect-detailed-traces many
--per-request-spec-decode-metrics value
--kv-cache-metrics switch
--kv-cache-metrics-sample value
--custom-histogram-buckets json
--cudagraph-metrics switch
--enable-layerwise-nvtx-tracing switch
--enable-mfu-metrics switch
--enable-logging-iteration-details switch
--jit-monitor-mode value
--jit-monitor-verbose switch
--stream-interval value
--max-seq-len-to-capture value
--ir-op-priority json
--enable-flashinfer-autotune switch
--enable-bf16x3-router-gemm switch
--sparse-indexer-topk-backend value
--gdn-prefill-backend value
--kda-prefill-backend value
--kda-decode-backend value
--watermark-config json
--kv-events-config json
--reasoning-config json
--structured-outputs-config json
--guided-decoding-backend value
--profiler-config json
--watchdog-config json
--disable-log-stats switch
--aggregate-engine-logging switch
--enable-log-requests switch
--disable-log-requests switch
--fail-on-environ-validation switch
--shutdown-timeout value
--use-v2-block-manager switch
--disable-async-output-proc switch
--tokenizer-pool-size value
--tokenizer-pool-type value
--tokenizer-pool-extra-config json
--disable-frontend-multiprocessing switch
--chat-template value
--chat-template-content-format value
--trust-request-chat-template switch
--trust-request-mm-kwargs switch
--default-chat-template-kwargs json
--reasoning-effort-map json
--response-role value
--return-tokens-as-token-ids switch
--enable-auto-tool-choice switch
--exclude-tools-when-tool-choice-none switch
--tool-call-parser value
--tool-parser-plugin value
--tool-strict-level value
--tool-server value
--max-log-len value
--enable-prompt-tokens-details switch
--enable-per-request-metrics switch
--enable-server-load-tracking switch
--enable-force-include-usage switch
--sse-keep-alive-interval value
--enable-tokenizer-info-endpoint switch
--enable-log-outputs switch
--enable-log-deltas switch
--cohere-is-reasoning-model switch
--cohere-format value
--anthropic-disabled-thinking-effort value
--log-error-stack switch
--tokens-only switch
--enable-scale-out switch
--fingerprint-mode value
--fingerprint-value value
--host value
--port value
--grpc switch
--grpc-port value
--data-parallel-supervisor-port value
--dp-supervisor-probe-interval-s value
--dp-supervisor-probe-timeout-s value
--dp-supervisor-probe-failure-threshold value
--uds value
--uvicorn-log-level value
--disable-uvicorn-access-log switch
--disable-access-log-for-endpoints value
--allow-credentials switch
--allowed-origins value
--allowed-methods value
--allowed-headers value
--api-key many
--ssl-keyfile value
--ssl-certfile value
--ssl-ca-certs value
--enable-ssl-refresh switch
--ssl-cert-reqs value
--ssl-ciphers value
--root-path value
--middleware value
--enable-request-id-headers switch
--disable-fastapi-docs switch
--h11-max-incomplete-event-size value
--h11-max-header-count value
--enable-offline-docs switch
--enable-flash-late-interaction switch
--headless switch
--api-server-count value
--model-name value
--model-dir value
"""

#: Short forms and second names.
_ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-dc": "--diffusion-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-O": "--compilation-config",  # with JSON, up to 0.11; a number is a level
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--model-id": "--model",  # of KServe's server for Hugging Face models
    "--model-tag": "--model",  # as a key of a --config file
}


def _table() -> Mapping[str, Flag]:
    flags = [Flag("--model", "value", "model"), Flag("--config", "value", "config")]
    for line in _OPTIONS.split("\n")[1:-1]:
        name, form, target = line.split()
        flags.append(Flag(name, form, "option", target))
    for effect, text in (
        ("read", _READ),
        ("memory", _MEMORY),
        ("scheduling", _SCHEDULING),
        ("harmless", _HARMLESS),
    ):
        for line in text.replace("\n    ", " ").split("\n")[1:-1]:
            head, _, neutral = line.partition("=")
            name, form = head.split()
            flags.append(Flag(name, form, effect, neutral=frozenset(neutral.split())))
    return {flag.name: flag for flag in flags}


#: Every flag, by its long name.
FLAGS: Mapping[str, Flag] = _table()

_OPPOSITE = {"--enable-": "--disable-", "--disable-": "--enable-"}


def canonical(name: str) -> str:
    """The long name of a flag as vLLM takes it: underscores are dashes, short forms are written out."""
    name = _ALIASES.get(name, name)
    name = "--" + name.lstrip("-").replace("_", "-")
    return _ALIASES.get(name, name)


def look_up(name: str) -> Meaning | None:
    """What a flag means, ``--no-x`` and the pair ``--enable-x``, ``--disable-x`` included; None if unknown.

    Abbreviations are not looked for: vLLM takes none that is not unique, and which are changes with each version.
    """
    name = canonical(name)
    if name in FLAGS:
        return Meaning(FLAGS[name], on=True)
    candidates = []
    if name.startswith("--no-"):
        candidates.append("--" + name.removeprefix("--no-"))
    for start, opposite in _OPPOSITE.items():
        if name.startswith(start):
            candidates.append(opposite + name.removeprefix(start))
    for candidate in candidates:
        flag = FLAGS.get(candidate)
        if flag is not None and flag.form == "switch":
            return Meaning(flag, on=False)
    return None


#: Environment variables that change the memory that vLLM takes or plans with, and the values that change nothing in
#: 0.33 (envs.py). Others are left alone.
MEMORY_VARIABLES: Mapping[str, frozenset[str]] = {
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": frozenset({"1"}),
    "VLLM_PP_LAYER_PARTITION": frozenset({""}),
    "VLLM_ATTENTION_BACKEND": frozenset({"", "FLASH_ATTN", "FLASH_ATTN_VLLM_V1"}),
    "VLLM_USE_V1": frozenset({"1"}),
    "VLLM_MLA_DISABLE": frozenset({"0"}),
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": frozenset({"1"}),
    "VLLM_ALL2ALL_BACKEND": frozenset({"", "naive", "allgather_reducescatter"}),
    "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": frozenset({str(394 << 20)}),
    "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE": frozenset({"256"}),
    "VLLM_FUSED_MOE_CHUNK_SIZE": frozenset({str(32 << 10), str(64 << 10)}),
    "VLLM_CPU_KVCACHE_SPACE": frozenset({"0"}),
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": frozenset({"512"}),
    "VLLM_DCP_Q_REPLICATE": frozenset({"0"}),
    "VLLM_REPLICATE_EMBED": frozenset({"0"}),
    "VLLM_USE_BREAKABLE_CUDAGRAPH": frozenset({"0"}),
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": frozenset({"0", ""}),
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": frozenset({""}),
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD": frozenset({"0"}),
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": frozenset({"1"}),
    "VLLM_MODEL_REDIRECT_PATH": frozenset({""}),
    "VLLM_TEST_FORCE_LOAD_FORMAT": frozenset({"", "dummy"}),
    "VLLM_BATCH_INVARIANT": frozenset({"0"}),
    "VLLM_USE_V2_MODEL_RUNNER": frozenset({"", "0"}),
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Keys of a speculative config that become options.
SPECULATIVE_OPTIONS = {
    "method": "speculative_method",
    "model": "speculative_model",
    "num_speculative_tokens": "num_speculative_tokens",
}
#: Keys of a speculative config that decide what is drafted or accepted (config/speculative.py), not what is held.
SPECULATIVE_HARMLESS = _names(
    "prompt_lookup_max prompt_lookup_min max_model_len revision code_revision disable_by_batch_size "
    "disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes "
    "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
    "suffix_decoding_min_token_prob draft_load_config rejection_sample_method synthetic_acceptance_rates "
    "synthetic_acceptance_length enable_adaptive_verification draft_sample_method acceptance_method "
    "posterior_threshold posterior_alpha disable_logprobs disable_log_stats fly_window_size fly_entropy_threshold "
    "fly_entropy_top_k use_local_argmax_reduction"
)
#: Keys of a compilation config (config/compilation.py) that decide how code is compiled, not what is held.
COMPILATION_HARMLESS = _names(
    "debug_dump_path cache_dir compile_cache_save_format backend custom_ops ir_enable_torch_wrap compile_sizes "
    "compile_ranges_endpoints inductor_compile_config inductor_passes use_inductor use_inductor_graph_partition "
    "cudagraph_num_of_warmups cudagraph_copy_inputs dynamic_shapes_config fast_moe_cold_start "
    "splitting_ops local_cache_dir"
)
#: And values of the others that are the default.
COMPILATION_NEUTRAL: Mapping[str, frozenset[str]] = {
    "mode": frozenset({"3", "VLLM_COMPILE"}),
    "level": frozenset({"3"}),
    "cudagraph_mode": frozenset({"FULL_AND_PIECEWISE"}),
    "use_cudagraph": frozenset({"TRUE"}),
    "compile_mm_encoder": frozenset({"FALSE"}),
    "cudagraph_mm_encoder": frozenset({"FALSE"}),
}
