"""What each option of vLLM means for kvferry: every field of its configuration and every variable
that it reads, of 0.32 and 0.33.

A new one has no place here, and a test fails until somebody has looked at what it decides.
"""

from __future__ import annotations

IDENTITY = "in identity, as it is set"
RESOLVED = "in identity by what vLLM makes of it: the running config, specs, layers, ranks"
REFUSED = "refused where it is set"
OFF = "nothing is loaded where it is set: some output needs every token, or KV sees later tokens"
ITEMS = "in the identity of requests with items, or these are not cached"
REQUEST = "read in each request"
HARMLESS = "decides no KV but for rounding"

LATER = frozenset(
    {
        "trtllm_ragged_backend",
        "indexer_tp_shard_min_rows",
        "minimax_m3_indexer_cp",
        "simple_cpu_offload_num_blocks",
        "monokernel",
        "disable_lookahead_block_hashes",
        "draft_lm_head_quantization",
        "xpress_topc",
        "fly_window_size",
        "fly_entropy_threshold",
        "fly_entropy_top_k",
        "watchdog_config",
        "timeout",
        "check_interval",
        "dump_dir",
    }
)
"""Fields that 0.32 has not."""

NO_OPTIONS = frozenset(
    {
        "BaseDummyOptions",
        "VideoDummyOptions",
        "ImageDummyOptions",
        "AudioDummyOptions",
        "Range",
        "QuantSpec",
        "SpeechToTextParams",
        "SpeechToTextConfig",
        "ModelArchitectureConfig",
    }
)
"""Classes of values that are made of options, or that belong to a request."""

OPTIONS: dict[str, dict[str, str]] = {
    "AttentionConfig": {
        IDENTITY: "disable_flashinfer_q_quantization use_prefill_query_quantization",
        RESOLVED: """
            backend backend_per_kind indexer_kv_dtype hisparse_config use_non_causal
        """,
        HARMLESS: """
            flash_attn_max_num_splits_for_cuda_graph flash_attn_version
            flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size
            flex_attn_q_block_size indexer_sparse_logits indexer_tp_shard_min_rows
            minimax_m3_indexer_cp minimax_m3_msa_decode_backend mla_prefill_backend
            sparse_mla_force_mqa sparse_mla_prefill_workspace_factor
            tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
            trtllm_ragged_backend use_trtllm_attention
        """,
    },
    "AuxOutputConfig": {
        OFF: "enable_return_routed_experts",
        HARMLESS: "max_bytes",
    },
    "CacheConfig": {
        IDENTITY: "cache_dtype kv_cache_dtype_skip_layers",
        RESOLVED: """
            block_size sliding_window kv_cache_layout mamba_page_size_padded
            skip_page_size_padded mamba_block_size mamba_cache_dtype
            mamba_ssm_cache_dtype mamba_cache_mode swa_bounded_replay use_replayssm
            use_kda_recoverssm replayssm_buffer_len
            enable_mamba_shared_prefix_checkpoint is_attention_free
        """,
        HARMLESS: """
            _block_size_resolved cache_hit_alignment_tokens
            effective_attention_block_size enable_prefix_caching
            gpu_memory_utilization hash_block_size kv_cache_max_concurrency
            kv_cache_memory_bytes kv_cache_size_tokens kv_offloading_backend
            kv_offloading_size kv_sharing_fast_prefill num_cpu_blocks num_gpu_blocks
            num_gpu_blocks_override prefix_cache_retention_interval
            prefix_caching_hash_algo prefix_match_unit simple_cpu_offload_num_blocks
            user_specified_block_size
        """,
    },
    "CompilationConfig": {
        HARMLESS: """
            backend cache_dir compilation_time compile_cache_save_format
            compile_mm_encoder compile_ranges_endpoints compile_sizes
            cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_decoder_replay
            cudagraph_mm_encoder cudagraph_mode cudagraph_num_of_warmups
            cudagraph_specialize_lora custom_ops debug_dump_path
            decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold
            disabled_custom_ops dynamic_shapes_config enabled_custom_ops
            encoder_compilation_time encoder_cudagraph_max_frames_per_batch
            encoder_cudagraph_max_vision_items_per_batch
            encoder_cudagraph_token_budgets fast_moe_cold_start
            inductor_compile_config inductor_passes ir_enable_torch_wrap
            local_cache_dir max_cudagraph_capture_size mode pass_config splitting_ops
            static_all_moe_layers static_forward_context traced_files
            use_inductor_graph_partition
        """,
    },
    "DeviceConfig": {
        HARMLESS: "device device_type",
    },
    "DiffusionConfig": {
        OFF: "canvas_length max_denoising_steps",
    },
    "DynamicShapesConfig": {
        HARMLESS: "assume_32_bit_indexing evaluate_guards type",
    },
    "ECTransferConfig": {
        HARMLESS: """
            ec_buffer_device ec_buffer_size ec_connector ec_connector_extra_config
            ec_connector_module_path ec_ip ec_port ec_role engine_id
            mm_encoder_output_widths
        """,
    },
    "EPLBConfig": {
        HARMLESS: """
            communicator enable_migration_batching log_balancedness
            log_balancedness_interval num_redundant_experts policy step_interval
            use_async window_size
        """,
    },
    "EncoderCacheManagerConfig": {
        HARMLESS: "encoder_cache_manager_cls manager_config",
    },
    "EngramConfig": {
        HARMLESS: "cpu_offload dp_shared_memory embedding_across_dp use_thp",
    },
    "FaultToleranceConfig": {
        HARMLESS: "engine_recovery_timeout_sec",
    },
    "HiSparseConfig": {
        HARMLESS: "device_buffer_size eager_host_mirror",
    },
    "IrOpPriorityConfig": {
        HARMLESS: "fused_add_rms_norm gelu_and_mul_sparse rms_norm",
    },
    "KVEventsConfig": {
        RESOLVED: "enable_kv_cache_events",
        HARMLESS: """
            buffer_steps endpoint hwm max_queue_size publisher replay_endpoint topic
        """,
    },
    "KVTransferConfig": {
        RESOLVED: "kv_role kv_connector_extra_config engine_id",
        HARMLESS: """
            enable_permute_local_kv kv_buffer_device kv_connector
            kv_connector_module_path kv_load_failure_policy kv_port
        """,
    },
    "KernelConfig": {
        IDENTITY: "moe_backend linear_backend linear_backend_per_quant",
        HARMLESS: """
            enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup
            enable_rocm_segmented_attn_autotune ir_op_priority monokernel
            sparse_indexer_topk_backend
        """,
    },
    "LoRAConfig": {
        IDENTITY: """
            target_modules enable_tower_connector_lora enable_mixed_moe_lora_format
            enable_moe_shared_loras
        """,
        REQUEST: "default_mm_loras",
        HARMLESS: """
            fully_sharded_loras lora_dtype max_cpu_loras max_lora_cls_labels
            max_lora_rank max_loras specialize_active_lora
        """,
    },
    "LoadConfig": {
        IDENTITY: "load_format model_loader_extra_config",
        HARMLESS: """
            device download_dir ignore_patterns pt_load_map_location
            safetensors_load_strategy safetensors_prefetch_block_size
            safetensors_prefetch_num_threads use_tqdm_on_load
        """,
    },
    "LoggingConfig": {
        HARMLESS: "configure_logging formatter log_level pylogging_config_file",
    },
    "MambaConfig": {
        HARMLESS: """
            backend enable_stochastic_rounding ssu_algorithm
            stochastic_rounding_philox_rounds
        """,
    },
    "ModelConfig": {
        IDENTITY: """
            model model_weights hf_config hf_text_config dtype quantization
            quantization_config hf_overrides trust_remote_code model_impl
        """,
        RESOLVED: """
            runner convert config_format hf_config_path revision code_revision
            model_class_overrides disable_sliding_window max_model_len pooler_config
            multimodal_config is_submodel_config
        """,
        ITEMS: """
            limit_mm_per_prompt media_io_kwargs mm_processor_kwargs
            mm_processor_cache_gb mm_encoder_attn_dtype mm_encoder_fp8_scale_path
            video_pruning_rate video_pruning_method
        """,
        REQUEST: "enable_prompt_embeds enable_mm_embeds",
        HARMLESS: """
            allow_deprecated_quantization allowed_local_media_path
            allowed_media_domains disable_cascade_attn enable_cumem_allocator
            enable_nccl_comm_suspend enable_sleep_mode enable_trace_replay
            enforce_eager generation_config hf_token interleave_mm_strings
            io_processor_plugin language_model_only logits_processors logprobs_mode
            max_logprobs mm_device_do_normalize mm_encoder_attn_backend
            mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
            mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm
            mm_ipc_gpu_memory_gb mm_processor_cache_type mm_processor_device
            mm_shm_cache_max_object_size_mb mm_tensor_ipc override_generation_config
            renderer_num_workers return_sampling_mask seed served_model_name
            skip_mm_profiling skip_tokenizer_init sleep_mode_backend
            sleep_mode_offload_cudagraph sleep_preserve_parameter_names
            spec_target_max_model_len tokenizer tokenizer_mode tokenizer_revision
            use_fp64_gumbel word_embeddings_untied_by_checkpoint
        """,
    },
    "MultiModalConfig": {
        ITEMS: """
            media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
            mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate
            video_pruning_method
        """,
        REQUEST: "enable_mm_embeds",
        HARMLESS: """
            allow_missing_mm_embeddings interleave_mm_strings language_model_only
            limit_per_prompt mm_device_do_normalize mm_encoder_attn_backend
            mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
            mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm
            mm_ipc_gpu_memory_gb mm_processor_cache_type
            mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling
        """,
    },
    "ObservabilityConfig": {
        HARMLESS: """
            collect_detailed_traces cudagraph_metrics custom_histogram_buckets
            enable_layerwise_nvtx_tracing enable_logging_iteration_details
            enable_mfu_metrics enable_mm_processor_stats jit_monitor_mode
            jit_monitor_verbose kv_cache_metrics kv_cache_metrics_sample
            otlp_traces_endpoint per_request_spec_decode_metrics
            show_hidden_metrics_for_version
        """,
    },
    "OffloadConfig": {
        HARMLESS: "offload_backend prefetch uva",
    },
    "ParallelConfig": {
        RESOLVED: """
            tensor_parallel_size rank world_size distributed_executor_backend
            data_parallel_index data_parallel_rank pipeline_parallel_size
        """,
        REFUSED: """
            decode_context_parallel_size prefill_context_parallel_size
        """,
        HARMLESS: """
            _allow_auto_resolve_cp_interleave_size _api_process_count
            _api_process_rank _coord_store_port _data_parallel_master_port_list
            all2all_backend assigned_physical_gpu_ids cp_kv_cache_interleave_size
            cpu_distributed_timeout_seconds data_parallel_backend
            data_parallel_external_lb data_parallel_hybrid_lb data_parallel_master_ip
            data_parallel_master_port data_parallel_rank_local data_parallel_rpc_port
            data_parallel_size data_parallel_size_local dbo_decode_token_threshold
            dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size
            dcp_q_replicate disable_custom_all_reduce
            disable_nccl_for_dp_synchronization distributed_timeout_seconds
            dp_sync_interval elastic_ep_max_dp_size enable_batch_sharded_sampling
            enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb
            enable_expert_parallel enable_fault_tolerance enable_hc_sp
            enable_shm_tensor_arena eplb_config expert_placement_strategy
            fault_tolerance_config is_moe_model master_addr master_port
            max_parallel_loading_workers nnodes node_rank numa_bind numa_bind_cpus
            numa_bind_nodes placement_group ray_runtime_env ray_workers_use_nsight
            ubatch_size worker_cls worker_extension_cls
        """,
    },
    "PassConfig": {
        HARMLESS: """
            eliminate_noops enable_qk_norm_rope_fusion fi_allreduce_fusion_max_size_mb
            fuse_act_padding fuse_act_quant fuse_allreduce_rms fuse_attn_quant
            fuse_mla_dual_rms_norm fuse_norm_quant fuse_qk_norm_rope_kvcache
            fuse_rope_kvcache fuse_rope_kvcache_cat_mla
            rope_kvcache_fusion_max_token_num
        """,
    },
    "PoolerConfig": {
        OFF: "pooling_type seq_pooling_type tok_pooling_type",
        HARMLESS: """
            dimensions enable_chunked_processing enable_flash_late_interaction
            logit_mean logit_sigma max_embed_len returned_token_ids step_tag_id task
            use_activation
        """,
    },
    "PrefetchOffloadConfig": {
        HARMLESS: """
            offload_group_size offload_num_in_group offload_params
            offload_prefetch_step
        """,
    },
    "ProfilerConfig": {
        HARMLESS: """
            active_iterations capture_torch_profiler delay_iterations
            detailed_trace_annotation ignore_frontend max_iterations profiler
            proton_backend proton_context proton_data proton_graph_attribution
            proton_hook proton_mode proton_output_format proton_profiler_dir
            torch_profiler_activities torch_profiler_dir
            torch_profiler_dump_cuda_time_total torch_profiler_record_shapes
            torch_profiler_use_gzip torch_profiler_with_flops
            torch_profiler_with_memory torch_profiler_with_stack wait_iterations
            warmup_iterations
        """,
    },
    "QuantizationConfigArgs": {
        IDENTITY: "linear moe ignore targets",
    },
    "ReasoningConfig": {
        HARMLESS: """
            _enabled _natural_reasoning_end_token_ids _reasoning_end_token_ids
            _reasoning_start_token_ids reasoning_end_str reasoning_parser
            reasoning_start_str
        """,
    },
    "SchedulerConfig": {
        RESOLVED: "max_num_batched_tokens",
        HARMLESS: """
            async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager
            enable_chunked_prefill encoder_cache_size is_encoder_decoder
            is_multimodal_model long_prefill_token_threshold
            long_prefill_token_threshold_adaptive max_model_len max_num_active_seqs
            max_num_encoder_input_tokens max_num_queued_reqs max_num_queued_tokens
            max_num_scheduled_tokens max_num_seqs policy prefill_schedule_interval
            runner_type scheduler_cls scheduler_reserve_full_isl stream_interval
            watermark
        """,
    },
    "SpeculativeConfig": {
        RESOLVED: "draft_model_config target_model_config",
        OFF: "method",
        HARMLESS: """
            attention_backend code_revision disable_eagle_block_drop
            disable_lookahead_block_hashes disable_padded_drafter_batch
            draft_lm_head_quantization draft_load_config draft_parallel_config
            draft_sample_method draft_tensor_parallel_size dspark_draft_topk
            enable_adaptive_verification enforce_eager fly_entropy_threshold
            fly_entropy_top_k fly_window_size index_share_for_mtp_iteration
            kv_cache_dtype max_model_len model moe_backend num_speculative_tokens
            num_speculative_tokens_per_batch_size parallel_drafting prompt_lookup_max
            prompt_lookup_min quantization rejection_sample_method revision
            suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
            suffix_decoding_max_tree_depth suffix_decoding_min_token_prob
            synthetic_acceptance_length synthetic_acceptance_rates
            target_parallel_config tensor_parallel_size use_heterogeneous_vocab
            use_local_argmax_reduction xpress_topc
        """,
    },
    "StructuredOutputsConfig": {
        HARMLESS: """
            backend disable_additional_properties disable_any_whitespace
            enable_in_reasoning reasoning_parser reasoning_parser_plugin
        """,
    },
    "UVAOffloadConfig": {
        HARMLESS: "cpu_offload_gb cpu_offload_params",
    },
    "VllmConfig": {
        IDENTITY: "additional_config",
        HARMLESS: """
            attention_config aux_output_config cache_config compilation_config
            device_config diffusion_config ec_manager_config ec_transfer_config
            engram_config instance_id kernel_config kv_events_config
            kv_transfer_config load_config logging_config lora_config mamba_config
            model_config observability_config offload_config optimization_level
            parallel_config performance_mode profiler_config quant_config
            reasoning_config scheduler_config shutdown_timeout speculative_config
            structured_outputs_config watchdog_config watermark_config
            weight_transfer_config
        """,
    },
    "WatchdogConfig": {
        HARMLESS: "check_interval dump_dir timeout",
    },
    "WatermarkConfig": {
        HARMLESS: """
            algorithm allow_target_only_watermarking alpha context_width
            deduplicate_contexts deduplicate_contexts_max_history key prf
        """,
    },
    "WeightTransferConfig": {
        HARMLESS: "backend",
    },
}

VARIABLES: dict[str, str] = {
    "VLLM_USE_MODELSCOPE": "models by name need a weights_version",
    "VLLM_MODEL_REDIRECT_PATH": RESOLVED,
    "VLLM_MLA_DISABLE": RESOLVED,
    "VLLM_KV_CACHE_LAYOUT": RESOLVED,
    "VLLM_SSM_CONV_STATE_LAYOUT": RESOLVED,
    "VLLM_PP_LAYER_PARTITION": REFUSED,
    "VLLM_USE_V2_MODEL_RUNNER": HARMLESS,
    "VLLM_USE_HW_AGNOSTIC": HARMLESS,
    "VLLM_VIDEO_LOADER_BACKEND": ITEMS,
}
"""Those of note. `kvferry.v1.running_model` lists the ones that are in identity."""

HARMLESS_VARIABLES = """
    /CMAKE_BUILD_TYPE /CUDA_HOME /CUDA_VISIBLE_DEVICES /FORCE_COLOR /LD_LIBRARY_PATH
    /LOCAL_RANK /MAX_JOBS /MOONCAKE_PREFERRED_SEGMENT /MOONCAKE_REQUESTER_LOCAL_HOSTNAME
    /NO_COLOR /NVCC_THREADS /S3_ACCESS_KEY_ID /S3_ENDPOINT_URL /S3_SECRET_ACCESS_KEY /VERBOSE
    ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE
    ALLOW_INSECURE_SERIALIZATION ALLOW_LONG_MAX_MODEL_LEN ALLOW_RUNTIME_LORA_UPDATING
    ALLREDUCE_USE_FLASHINFER ALLREDUCE_USE_FLASHINFER_PCIE_IPC ALLREDUCE_USE_SYMM_MEM API_KEY
    ASSETS_CACHE ASSETS_CACHE_MODEL_CLEAN AUDIO_FETCH_TIMEOUT BEAM_ALWAYS_CONSTRAIN_OUTPUT
    BLOCKSCALE_FP8_GEMM_FLASHINFER BUILD_COMMIT BUILD_PIPELINE BUILD_URL CACHE_ROOT
    CHAT_TEMPLATE_FUEL CHAT_TEMPLATE_RENDER_TIMEOUT
    COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD COMPILE_CACHE_SAVE_FORMAT
    COMPUTE_NANS_IN_LOGITS CONFIGURE_LOGGING CONFIG_ROOT CPU_ATTN_SPLIT_KV CPU_CI_ENV
    CPU_KVCACHE_SPACE CPU_NUM_OF_RESERVED_CPU CPU_OMP_THREADS_BIND CUDART_SO_PATH
    CUDA_COMPATIBILITY_PATH CUSTOM_SCOPES_FOR_PROFILING DBO_COMM_SMS DCP_Q_REPLICATE
    DEBUG_DUMP_PATH DEBUG_LOG_API_SERVER_RESPONSE DEBUG_MFU_METRICS DEBUG_WORKSPACE
    DEEPEP_BUFFER_SIZE_MB DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE DEEPEP_LOW_LATENCY_USE_MNNVL
    DEEPEP_V2_ALLOW_HYBRID_MODE DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION DEEPEP_V2_PREFER_OVERLAP
    DEEP_GEMM_WARMUP DISABLED_KERNELS DISABLE_COMPILE_CACHE
    DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION DISABLE_LOG_LOGO DISABLE_PYNCCL
    DISABLE_REQUEST_ID_RANDOMIZATION DISABLE_SHARED_EXPERTS_STREAM DISTRIBUTED_USE_SPLIT_GROUP
    DOCKER_BUILD_CONTEXT DO_NOT_TRACK DP_MASTER_IP DP_MASTER_PORT DP_RANK DP_RANK_LOCAL
    DP_SIZE EC_SIDE_CHANNEL_HOST EC_SIDE_CHANNEL_PORT ELASTIC_EP_DRAIN_REQUESTS
    ELASTIC_EP_SCALE_UP_LAUNCH ENABLE_COHERE_API ENABLE_CUDAGRAPH_GC ENABLE_CUDA_COMPATIBILITY
    ENABLE_FLA_PACKED_RECURRENT_DECODE ENABLE_GEMM_RS ENABLE_HPC_OPS
    ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING ENABLE_INDUCTOR_MAX_AUTOTUNE
    ENABLE_PREGRAD_PASSES ENABLE_RESPONSES_API_STORE ENABLE_STARTUP_PLAN
    ENABLE_V1_MULTIPROCESSING ENFORCE_STRICT_TOOL_CALLING ENGINE_READY_TIMEOUT_S
    EXECUTE_MODEL_TIMEOUT_SECONDS FASTSAFETENSORS_QUEUE_SIZE FLASHINFER_ALLREDUCE_BACKEND
    FLASHINFER_AUTOTUNE_CACHE_DIR FLASHINFER_AUTOTUNE_SKIP_OPS
    FLASHINFER_WORKSPACE_BUFFER_SIZE FORCE_AOT_LOAD GC_DEBUG GDN_DECODE_KERNEL
    GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS GPT_OSS_SYSTEM_TOOL_MCP_LABELS GPU_NIC_PCIE_MAPPING
    GPU_SYNC_CHECK HAS_FLASHINFER_CUBIN HOST_IP HTTP_MAX_REQUEST_BODY_SIZE
    HTTP_TIMEOUT_KEEP_ALIVE HUMMING_MOE_GEMM_TYPE HUMMING_USE_F16_ACCUM IMAGE_FETCH_TIMEOUT
    IMAGE_TAG KEEP_ALIVE_ON_ENGINE_DEATH KIMI_K3_AUX_ATTN_RES_STREAM KIMI_K3_GEMM_AR
    KIMI_K3_SHARD_SP_SHARED_EXPERT KV_EVENTS_USE_INT_BLOCK_HASHES
    KV_OFFLOAD_MAX_BATCH_DESCRIPTORS LOGGING_COLOR LOGGING_CONFIG_PATH LOGGING_LEVEL
    LOGGING_PREFIX LOGGING_STREAM LOG_BATCHSIZE_INTERVAL LOG_MODEL_INSPECTION
    LOG_STATS_INTERVAL LOOPBACK_IP LORA_DISABLE_PDL LORA_ENABLE_DUAL_STREAM
    LORA_RESOLVER_CACHE_DIR LORA_RESOLVER_HF_REPO_LIST MAIN_CUDA_VERSION MARLIN_USE_ATOMIC_ADD
    MAX_AUDIO_CLIP_FILESIZE_MB MAX_AUDIO_DECODE_BYTES MAX_AUDIO_DECODE_DURATION_S
    MAX_AUDIO_PREPROCESS_WORKERS MAX_BAD_WORDS_TOTAL_TOKENS MAX_COMPLETION_PROMPTS
    MAX_EMBED_DECODE_BYTES MAX_IMAGE_PIXELS MAX_MEDIA_DOWNLOAD_SIZE_MB
    MAX_MEDIA_REQUEST_DECODE_BYTES MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB MAX_NUM_BAD_WORDS
    MAX_N_SEQUENCES MAX_STOP_STRINGS MAX_TOKENS_PER_EXPERT_FP4_MOE MEDIA_CACHE
    MEDIA_CACHE_MAX_SIZE_MB MEDIA_CACHE_TTL_HOURS MEDIA_CONNECTOR MEDIA_FETCH_MAX_RETRIES
    MEDIA_LOADING_THREAD_COUNT MEDIA_URL_ALLOW_REDIRECTS MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
    MOE_SKIP_PADDING MOE_USE_DEEP_GEMM MOONCAKE_ABORT_REQUEST_TIMEOUT MOONCAKE_BOOTSTRAP_PORT
    MOONCAKE_CONNECTOR_TIMEOUT MOONCAKE_DISK_STAGING_USABLE_RATIO MOONCAKE_LOAD_RECV_THREADS
    MOONCAKE_STORE_TIER_LOG MQ_MAX_CHUNK_BYTES_MB MSGPACK_ZERO_COPY_THRESHOLD
    MULTI_STREAM_GEMM_TOKEN_THRESHOLD MXFP4_EMULATION_DEQUANT_AT_LOAD
    MXFP8_EMULATION_DEQUANT_AT_LOAD NCCL_INCLUDE_PATH NCCL_SO_PATH NIC_SELECTION_VARS
    NIXL_SIDE_CHANNEL_HOST NIXL_SIDE_CHANNEL_PORT NO_USAGE_STATS NVTX_SCOPES_FOR_PROFILING
    OBJECT_STORAGE_SHM_BUFFER_NAME P2P_HANDSHAKE_TIMEOUT_S P2P_IDLE_TIMEOUT_S P2P_MAX_PEERS
    P2P_SIDE_CHANNEL_HOST P2P_SIDE_CHANNEL_PORT PATTERN_MATCH_DEBUG PLUGINS PORT
    PROCESS_NAME_PREFIX RAISE_ON_LOGIT_NANS RANDOMIZE_DP_DUMMY_INPUTS RAY_BUNDLE_INDICES
    RAY_DP_PACK_STRATEGY RAY_DP_PLACEMENT_NODE_IPS RAY_EXTRA_ENV_VARS_TO_COPY
    RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY RAY_PER_WORKER_GPUS REGEX_COMPILATION_TIMEOUT_S
    REPLICATE_EMBED REQUEST_BODY_LOG_LEVEL RINGBUFFER_WARNING_INTERVAL
    ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS ROCM_AITER_MLA_ASM_PADDING
    ROCM_AITER_MLA_DCP_VERIFY ROCM_AITER_MOE_DISPATCH_POLICY ROCM_FP8_PADDING ROCM_MOE_PADDING
    ROCM_MONO_DECODE ROCM_MUSE_MOE_REDUCE_DTYPE ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
    ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB
    ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB ROCM_SLEEP_MEM_CHUNK_SIZE ROCM_USE_AITER
    ROCM_USE_AITER_CUSTOM_AR ROCM_USE_AITER_FP4_ASM_GEMM ROCM_USE_AITER_FUSION_SHARED_EXPERTS
    ROCM_USE_AITER_LINEAR ROCM_USE_AITER_LINEAR_HIPBMM ROCM_USE_AITER_MHA ROCM_USE_AITER_MLA
    ROCM_USE_AITER_MOE ROCM_USE_AITER_RMSNORM ROCM_USE_AITER_TRITON_GEMM
    ROCM_USE_AITER_TRITON_ROPE ROCM_USE_AITER_TRITON_SPARSE_MLA
    ROCM_USE_AITER_UNIFIED_ATTENTION ROCM_USE_SKINNY_GEMM RPC_BASE_PATH RUST_FRONTEND_PATH
    SERVER_DEV_MODE SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD SKIP_MODEL_NAME_VALIDATION
    SKIP_P2P_CHECK SKIP_PRECOMPILED_VERSION_SUFFIX SKIP_VERSION_SUFFIX
    SPARSE_INDEXER_MAX_LOGITS_MB STEP5_SHARD_SP_SHARED_EXPERT SYSTEM_START_DATE TARGET_DEVICE
    TEST_FORCE_LOAD_FORMAT TOOL_JSON_ERROR_AUTOMATIC_RETRY TOOL_PARSE_REGEX_TIMEOUT_SECONDS
    TPU_USING_PATHWAYS TRACE_FUNCTION TRITON_FORCE_FIRST_CONFIG TRITON_JIT_WARMUP_NUM_THREADS
    TRITON_USE_TD TUNED_CONFIG_FOLDER USAGE_SOURCE USAGE_STATS_SERVER USE_AOT_COMPILE
    USE_BREAKABLE_CUDAGRAPH USE_BYTECODE_HOOK USE_DEEP_GEMM USE_DEEP_GEMM_TMA_ALIGNED_SCALES
    USE_DIRECT_DCP_A2A USE_DIRECT_DCP_KV_GATHER USE_DIRECT_DCP_Q_GATHER
    USE_EXPERIMENTAL_PARSER_CONTEXT USE_FASTOKENS USE_FLASHINFER_MOE_INT4
    USE_FLASHINFER_SAMPLER USE_FUSED_MOE_GROUPED_TOPK USE_LAYERNAME USE_MEGA_AOT_ARTIFACT
    USE_NCCL_SYMM_MEM USE_OINK_OPS USE_PRECOMPILED USE_PRECOMPILED_RUST
    USE_RAY_COMPILED_DAG_CHANNEL_TYPE USE_RAY_COMPILED_DAG_OVERLAP_COMM
    USE_RAY_V2_EXECUTOR_BACKEND USE_RAY_WRAPPED_PP_COMM USE_RUST_BENCH USE_RUST_FRONTEND
    USE_SIMPLE_KV_OFFLOAD USE_SPINLOOP_EXT USE_STANDALONE_COMPILE USE_TRITON_AWQ
    V1_OUTPUT_PROC_CHUNK_SIZE V1_USE_OUTLINES_CACHE VIDEO_FETCH_TIMEOUT
    WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY WEIGHT_OFFLOADING_DISABLE_UVA WORKER_MULTIPROC_METHOD
    WORKER_SHUTDOWN_TIMEOUT_SECONDS WSL2_ENABLE_PIN_MEMORY XGRAMMAR_CACHE_MB XLA_CACHE_PATH
    XLA_CHECK_RECOMPILATION XLA_USE_SPMD XPU_FORCE_N_CONTIG_WEIGHT XPU_INC_WNA16_BACKEND
    XPU_PP_MICROBATCH XPU_USE_SAMPLER_KERNEL ZENTORCH_WEIGHT_PREPACK
"""
"""Without "VLLM_"; a slash stands before those that are named otherwise."""
