"""Every field of vLLM's configuration classes: whether the bytes of a KV block may depend on it.

`inside`: part of the namespace. `outside`: not, listed by reason. A field in neither list was added by a later vLLM: it
counts as inside, and a test fails until it is classified. Fields of 0.23 first; ADDED has those of 0.30 and later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_RESULT = "what follows from it is in the namespace as resolved: hf_config, compilation, KV groups, registered layout"
_WEIGHTS = "where the weights come from and how they are read; what they are is their identity"
_TOKENS = "decides which tokens there are; a block's key holds them"
_KEY = "in the block's key"
_SAMPLING = "after the last layer: what is made of the logits, what is reported, who may ask for it"
_CAPACITY = "how much fits, and how many requests at once"
_PLACE = "where processes run and how they reach each other"
_OBSERVED = "logs, metrics, profiles"
_ROUNDING = "the order of the same arithmetic: differences no larger than those between two sizes of a batch"
_OTHER_MACHINERY = "moves bytes between memories without changing them"


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one configuration class, by its name in vllm.config."""

    inside: frozenset[str]
    outside: Mapping[str, frozenset[str]]  # reason -> names

    @property
    def left_out(self) -> frozenset[str]:
        return frozenset().union(*self.outside.values())


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _fields(inside: str, outside: Mapping[str, str]) -> Fields:
    return Fields(_names(inside), {reason: _names(names) for reason, names in outside.items()})


FIRST: Mapping[str, Fields] = {
    "VllmConfig": _fields(
        "model_config cache_config parallel_config load_config attention_config mamba_config kernel_config lora_config "
        "speculative_config compilation_config additional_config",
        {
            _RESULT: "quant_config optimization_level performance_mode device_config",
            _CAPACITY: "scheduler_config",
            _OTHER_MACHINERY: "offload_config kv_transfer_config ec_transfer_config weight_transfer_config",
            _SAMPLING: "structured_outputs_config reasoning_config",
            _OBSERVED: "observability_config profiler_config kv_events_config",
            _PLACE: "instance_id shutdown_timeout",
        },
    ),
    "ModelConfig": _fields(
        "runner convert trust_remote_code dtype hf_config hf_text_config code_revision quantization "
        "quantization_config disable_sliding_window model_impl override_attention_dtype multimodal_config",
        {
            _RESULT: "hf_config_path hf_overrides config_format enforce_eager",
            "named where bytes depend on it: see context_length_facts": "max_model_len",
            "of random weights only, whose identity names it": "seed",
            _WEIGHTS: "model model_weights revision hf_token allow_deprecated_quantization",
            _TOKENS: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init allowed_local_media_path "
            "allowed_media_domains renderer_num_workers",
            _KEY: "enable_prompt_embeds",
            _SAMPLING: "enable_return_routed_experts max_logprobs logprobs_mode use_fp64_gumbel served_model_name "
            "generation_config override_generation_config logits_processors io_processor_plugin pooler_config",
            _CAPACITY: "spec_target_max_model_len enable_sleep_mode enable_cumem_allocator",
            _ROUNDING: "disable_cascade_attn",
        },
    ),
    "CacheConfig": _fields(
        "block_size cache_dtype sliding_window prefix_caching_hash_algo calculate_kv_scales "
        "kv_cache_dtype_skip_layers mamba_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype "
        "mamba_cache_mode kv_sharing_fast_prefill",
        {
            _RESULT: "user_specified_block_size user_specified_mamba_block_size is_attention_free _block_size_resolved",
            "resolved in tokens_per_hash; with one rank alone the worker writes that here": "hash_block_size",
            _CAPACITY: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
            "kv_cache_memory_bytes enable_prefix_caching",
            _OTHER_MACHINERY: "kv_offloading_size kv_offloading_backend",
        },
    ),
    "ParallelConfig": _fields(
        "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size decode_context_parallel_size "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size dcp_comm_backend enable_expert_parallel worker_cls "
        "worker_extension_cls sd_worker_cls",
        {
            _RESULT: "world_size is_moe_model",
            _ROUNDING: "all2all_backend disable_custom_all_reduce enable_dbo ubatch_size dbo_decode_token_threshold "
            "dbo_prefill_token_threshold enable_eplb eplb_config expert_placement_strategy enable_elastic_ep "
            "enable_ep_weight_filter",
            "replicas, each with all of the KV of its requests": "data_parallel_size data_parallel_size_local "
            "data_parallel_rank data_parallel_rank_local data_parallel_index data_parallel_backend "
            "data_parallel_external_lb data_parallel_hybrid_lb",
            _PLACE: "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port "
            "_data_parallel_master_port_list _coord_store_port disable_nccl_for_dp_synchronization ray_runtime_env "
            "placement_group distributed_executor_backend master_addr master_port node_rank nnodes numa_bind "
            "numa_bind_nodes numa_bind_cpus distributed_timeout_seconds cpu_distributed_timeout_seconds rank "
            "_api_process_count _api_process_rank",
            _WEIGHTS: "max_parallel_loading_workers",
            _OBSERVED: "ray_workers_use_nsight",
        },
    ),
    "AttentionConfig": _fields(
        "backend flash_attn_version use_prefill_decode_attention use_trtllm_attention mla_prefill_backend "
        "disable_flashinfer_q_quantization use_prefill_query_quantization use_fp4_indexer_cache use_non_causal",
        {
            _ROUNDING: "flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph flex_attn_block_m "
            "flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size",
        },
    ),
    "MambaConfig": _fields("backend enable_stochastic_rounding stochastic_rounding_philox_rounds", {}),
    "KernelConfig": _fields("ir_op_priority moe_backend linear_backend", {_ROUNDING: "enable_flashinfer_autotune"}),
    "IrOpPriorityConfig": _fields("rms_norm fused_add_rms_norm", {}),
    "LoRAConfig": _fields(
        "fully_sharded_loras lora_dtype target_modules enable_tower_connector_lora enable_mixed_moe_lora_format",
        {
            _CAPACITY: "max_lora_rank max_loras max_cpu_loras",
            _KEY: "default_mm_loras",  # the adapter of a request, whatever chose it
            _ROUNDING: "specialize_active_lora",
        },
    ),
    "SpeculativeConfig": _fields(
        "method draft_tensor_parallel_size quantization moe_backend attention_backend parallel_drafting "
        "draft_model_config",
        {
            _WEIGHTS: "model revision code_revision draft_load_config",
            _RESULT: "tensor_parallel_size target_model_config target_parallel_config draft_parallel_config",
            _ROUNDING: "enforce_eager disable_padded_drafter_batch",
            _CAPACITY: "max_model_len",
            _SAMPLING: "num_speculative_tokens use_local_argmax_reduction prompt_lookup_max prompt_lookup_min "
            "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
            "suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates "
            "synthetic_acceptance_length draft_sample_method",
        },
    ),
    "MultiModalConfig": _fields(
        "language_model_only media_io_kwargs mm_processor_kwargs mm_encoder_only mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_attn_dtype video_pruning_rate",
        {
            "the file's content is in the namespace": "mm_encoder_fp8_scale_path",
            _OBSERVED: "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
            _TOKENS: "interleave_mm_strings limit_per_prompt",
            _KEY: "enable_mm_embeds",
            _CAPACITY: "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
            "skip_mm_profiling",
            _OTHER_MACHINERY: "mm_tensor_ipc",
        },
    ),
    "CompilationConfig": _fields(
        "mode backend custom_ops pass_config",
        {
            _ROUNDING: "ir_enable_torch_wrap splitting_ops compile_mm_encoder cudagraph_mm_encoder compile_sizes "
            "compile_ranges_endpoints inductor_compile_config inductor_passes use_inductor_graph_partition "
            "dynamic_shapes_config fast_moe_cold_start",
            _CAPACITY: "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
            "encoder_cudagraph_max_frames_per_batch cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes "
            "cudagraph_copy_inputs cudagraph_specialize_lora max_cudagraph_capture_size",
            _OBSERVED: "debug_dump_path cache_dir compile_cache_save_format local_cache_dir enabled_custom_ops "
            "disabled_custom_ops traced_files compilation_time encoder_compilation_time",
            _RESULT: "static_forward_context static_all_moe_layers",
        },
    ),
    "PassConfig": _fields(
        "fuse_norm_quant fuse_act_quant fuse_attn_quant fuse_rope_kvcache_cat_mla fuse_rope_kvcache "
        "fuse_mla_dual_rms_norm",
        {
            _ROUNDING: "eliminate_noops enable_sp fuse_gemm_comms fuse_allreduce_rms fuse_minimax_qk_norm "
            "enable_qk_norm_rope_fusion fuse_act_padding rope_kvcache_fusion_max_token_num "
            "fi_allreduce_fusion_max_size_mb sp_min_token_num",
        },
    ),
    "LoadConfig": _fields(
        "load_format model_loader_extra_config",
        {
            _WEIGHTS: "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
            "safetensors_prefetch_block_size device ignore_patterns pt_load_map_location",
            _OBSERVED: "use_tqdm_on_load",
        },
    ),
}

# Fields that 0.30 and later added, in classes of 0.23 and in new ones.
ADDED: Mapping[str, Fields] = {
    "VllmConfig": _fields(
        "diffusion_config engram_config",
        {
            _SAMPLING: "aux_output_config watermark_config",
            _OTHER_MACHINERY: "ec_manager_config",
            _OBSERVED: "logging_config watchdog_config",
        },
    ),
    "ModelConfig": _fields(
        "model_class_overrides",
        {
            _WEIGHTS: "word_embeddings_untied_by_checkpoint sleep_preserve_parameter_names",
            _RESULT: "is_submodel_config",
            _SAMPLING: "enable_trace_replay return_sampling_mask",
            _CAPACITY: "enable_nccl_comm_suspend sleep_mode_backend sleep_mode_offload_cudagraph",
        },
    ),
    "CacheConfig": _fields(
        "kv_cache_layout prefix_match_unit effective_attention_block_size "
        "enable_mamba_fine_grained_prefix_cache enable_mamba_shared_prefix_checkpoint replayssm_buffer_len "
        "use_replayssm use_kda_recoverssm skip_page_size_padded swa_bounded_replay",
        {
            "where a hit may end; with one rank alone the worker writes it here": "cache_hit_alignment_tokens",
            _CAPACITY: "kv_cache_max_concurrency kv_cache_size_tokens prefix_cache_retention_interval",
            _OTHER_MACHINERY: "simple_cpu_offload_num_blocks",
        },
    ),
    "ParallelConfig": _fields(
        "",
        {
            _ROUNDING: "dcp_q_replicate enable_hc_sp",
            _SAMPLING: "enable_batch_sharded_sampling",
            "replicas, each with all of the KV of its requests": "dp_sync_interval elastic_ep_max_dp_size",
            _PLACE: "_allow_auto_resolve_cp_interleave_size assigned_physical_gpu_ids enable_fault_tolerance "
            "fault_tolerance_config enable_shm_tensor_arena",
        },
    ),
    "AttentionConfig": _fields(
        "backend_per_kind hisparse_config indexer_kv_dtype indexer_sparse_logits sparse_mla_force_mqa "
        "trtllm_ragged_backend",
        {
            _ROUNDING: "indexer_tp_shard_min_rows minimax_m3_indexer_cp minimax_m3_msa_decode_backend "
            "tokenspeed_mla_min_split_kv",
            _CAPACITY: "sparse_mla_prefill_workspace_factor",
        },
    ),
    "MambaConfig": _fields("ssu_algorithm", {}),
    "KernelConfig": _fields(
        "linear_backend_per_quant monokernel sparse_indexer_topk_backend",
        {_ROUNDING: "enable_cutedsl_warmup enable_jit_warmup enable_rocm_segmented_attn_autotune"},
    ),
    "IrOpPriorityConfig": _fields("gelu_and_mul_sparse", {}),
    "LoRAConfig": _fields("enable_moe_shared_loras", {_CAPACITY: "max_lora_cls_labels"}),
    "SpeculativeConfig": _fields(
        "kv_cache_dtype index_share_for_mtp_iteration",
        {
            _SAMPLING: "disable_eagle_block_drop draft_lm_head_quantization dspark_draft_topk "
            "enable_adaptive_verification fly_entropy_threshold fly_entropy_top_k fly_window_size "
            "num_speculative_tokens_per_batch_size use_heterogeneous_vocab xpress_topc",
            _KEY: "disable_lookahead_block_hashes",
        },
    ),
    "MultiModalConfig": _fields(
        "mm_device_do_normalize video_pruning_method",
        {
            _KEY: "mm_hasher_algorithm allow_missing_mm_embeddings",
            _CAPACITY: "mm_ipc_gpu_memory_gb",
        },
    ),
    "CompilationConfig": _fields(
        "",
        {
            _CAPACITY: "cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes",
            _ROUNDING: "decoder_replay_trim_threshold",
        },
    ),
    "PassConfig": _fields("fuse_qk_norm_rope_kvcache", {}),
}


def _both(first: Fields, added: Fields | None) -> Fields:
    if added is None:
        return first
    reasons = first.outside.keys() | added.outside.keys()
    outside = {why: first.outside.get(why, frozenset()) | added.outside.get(why, frozenset()) for why in reasons}
    return Fields(first.inside | added.inside, outside)


CONFIG_FIELDS: Mapping[str, Fields] = {name: _both(fields, ADDED.get(name)) for name, fields in FIRST.items()}

# Fields of a model's hf_config: its origin, the version of transformers that read it, and what vLLM writes into it
# while it runs.
HF_CONFIG_LEFT_OUT = frozenset({"_name_or_path", "transformers_version", "max_model_len"})

# Rotations of a position that do not depend on max_model_len in vLLM 0.23. "longrope" takes its long factors where it
# exceeds the original length (rotary_embedding/phi3_long_rope_scaled_rope.py), and "dynamic" computes its base from the
# longest position, which some models take from it (models/minimax_m2.py, plamo3.py).
ROPE_TYPES_OF_ANY_LENGTH = frozenset({"default", "linear", "llama3", "yarn", "deepseek_yarn", "mrope"})
# Architectures whose layers read max_model_len (models/llama4.py: a temperature above 32,768 tokens).
ARCHITECTURES_BY_LENGTH = frozenset({"Llama4ForCausalLM", "Llama4ForConditionalGeneration"})


# Environment variables that vLLM reads and its compile_factors() does not ignore: those that choose arithmetic or
# layout. One that is set is in the namespace by name and value.
ENVIRONMENT = _names(
    """
    K_SCALE_CONSTANT Q_SCALE_CONSTANT V_SCALE_CONSTANT VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE
    VLLM_BATCH_INVARIANT VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_INT4_W4A8
    VLLM_CPU_SGL_KERNEL VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_DISABLED_KERNELS VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE
    VLLM_FLASHINFER_MOE_BACKEND VLLM_FLOAT32_MATMUL_PRECISION VLLM_HUMMING_INPUT_QUANT_CONFIG
    VLLM_HUMMING_MOE_GEMM_TYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM VLLM_KV_CACHE_LAYOUT
    VLLM_MARLIN_INPUT_DTYPE VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_MLA_DISABLE VLLM_MM_HASHER_ALGORITHM
    VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_MOE_USE_DEEP_GEMM VLLM_MXFP4_USE_MARLIN VLLM_NVFP4_GEMM_BACKEND
    VLLM_PP_LAYER_PARTITION VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_FP8_MFMA_PAGE_ATTN
    VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 VLLM_ROCM_QUICK_REDUCE_QUANTIZATION
    VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_USE_AITER
    VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_FP8BMM
    VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_LINEAR_HIPBMM
    VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_PAGED_ATTN
    VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE
    VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_SKINNY_GEMM VLLM_SSM_CONV_STATE_LAYOUT
    VLLM_TEST_FORCE_FP8_MARLIN VLLM_TRITON_ATTN_USE_TD VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0
    VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_FBGEMM VLLM_USE_FLASHINFER_MOE_FP16 VLLM_USE_FLASHINFER_MOE_FP4
    VLLM_USE_FLASHINFER_MOE_FP8 VLLM_USE_FLASHINFER_MOE_INT4 VLLM_USE_FLASHINFER_MOE_MXFP4_BF16
    VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8 VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS VLLM_USE_FUSED_MOE_GROUPED_TOPK
    VLLM_USE_NVFP4_CT_EMULATIONS VLLM_USE_OINK_OPS VLLM_USE_TRITON_AWQ VLLM_USE_V2_MODEL_RUNNER
    """
)
# The rest of what compile_factors() does not ignore: places, secrets, bounds, logs, and how graphs are built.
ENVIRONMENT_LEFT_OUT = _names(
    """
    CMAKE_BUILD_TYPE CUDA_HOME MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME NVCC_THREADS
    RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES
    RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES
    RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR
    RAY_EXPERIMENTAL_NOSET_RBLN_RT_VISIBLE_DEVICES RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES
    RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS VERBOSE VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_LONG_MAX_MODEL_LEN
    VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_API_KEY
    VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING VLLM_CONFIG_ROOT
    VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_CUDART_SO_PATH VLLM_CUSTOM_SCOPES_FOR_PROFILING
    VLLM_DBO_COMM_SMS VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE VLLM_DEEPEP_BUFFER_SIZE_MB
    VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEP_GEMM_WARMUP
    VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_LOG_LOGO VLLM_DISABLE_PYNCCL VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
    VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_DOCKER_BUILD_CONTEXT VLLM_DP_RANK
    VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
    VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE
    VLLM_ENABLE_PREGRAD_PASSES VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING
    VLLM_ENGINE_READY_TIMEOUT_S VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_ALLREDUCE_FUSION_THRESHOLDS_MB
    VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_GC_DEBUG VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
    VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPU_NIC_PCIE_MAPPING VLLM_HAS_FLASHINFER_CUBIN
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_LOOPBACK_IP
    VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST
    VLLM_MAIN_CUDA_VERSION VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MAX_N_SEQUENCES VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
    VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO
    VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD
    VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_NIC_SELECTION_VARS
    VLLM_NIXL_EP_MAX_NUM_RANKS VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_PATTERN_MATCH_DEBUG
    VLLM_PLUGINS VLLM_PREFIX_CACHE_RETENTION_INTERVAL VLLM_PROCESS_NAME_PREFIX VLLM_RAY_BUNDLE_INDICES
    VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY
    VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING
    VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
    VLLM_RUST_FRONTEND_PATH VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_SKIP_P2P_CHECK
    VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_SYSTEM_START_DATE VLLM_TARGET_DEVICE
    VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_TPU_BUCKET_PADDING_GAP
    VLLM_TPU_MOST_MODEL_LEN VLLM_TPU_USING_PATHWAYS VLLM_TRACE_FUNCTION VLLM_USAGE_SOURCE VLLM_USE_AOT_COMPILE
    VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_BYTECODE_HOOK VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS
    VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_NCCL_SYMM_MEM
    VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
    VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM
    VLLM_USE_RUST_FRONTEND VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_SPINLOOP_EXT VLLM_USE_STANDALONE_COMPILE
    VLLM_V1_USE_OUTLINES_CACHE VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
    VLLM_XGRAMMAR_CACHE_MB VLLM_XLA_CACHE_PATH VLLM_XLA_CHECK_RECOMPILATION VLLM_XLA_USE_SPMD
    VLLM_XPU_ENABLE_XPU_GRAPH VLLM_XPU_USE_SAMPLER_KERNEL
    """
)
# The same of what 0.30 and later added.
ENVIRONMENT_ADDED = _names(
    """
    VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_DCP_Q_REPLICATE VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION
    VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_ENABLE_GEMM_RS VLLM_ENABLE_HPC_OPS
    VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_GDN_DECODE_KERNEL VLLM_KIMI_K3_AUX_ATTN_RES_STREAM
    VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_GEMM_RS VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_MOE_SKIP_PADDING
    VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_REPLICATE_EMBED
    VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_AITER_MLA_DCP_VERIFY
    VLLM_ROCM_MONO_DECODE VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_ROCM_USE_AITER_CUSTOM_AR
    VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_MOE_SITUV2 VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4
    VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_TRITON_FORCE_FIRST_CONFIG
    VLLM_TRITON_USE_TD VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_USE_DIRECT_DCP_Q_GATHER
    VLLM_USE_HW_AGNOSTIC VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_INC_WNA16_BACKEND
    """
)
ENVIRONMENT_LEFT_OUT_ADDED = _names(
    """
    VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC
    VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL
    VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_CPU_CI_ENV
    VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT
    VLLM_ENABLE_COHERE_API VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_GPU_SYNC_CHECK VLLM_IMAGE_TAG
    VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS
    VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_STOP_STRINGS VLLM_MOONCAKE_CONNECTOR_TIMEOUT
    VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS
    VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PLE_CPU_OFFLOAD VLLM_RAISE_ON_LOGIT_NANS
    VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_USE_RUST_BENCH VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_XPU_PP_MICROBATCH
    """
)
ENVIRONMENT_PREFIX_OF_PLUGINS = "VLLM_ASCEND_"  # not among vLLM's own variables; all of them count
