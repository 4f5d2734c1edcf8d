#include "config/compat.h"

#include "base/error.h"

#define SHARDS    "token shards are written under output_dir and rebuilt when they are stale"
#define LOADER    "the loader reads a memory-mapped token shard and needs no workers"
#define ONE       "one process drives the device"
#define STREAMS   "blocks are streamed through the device by forebay itself"
#define KERNELS   "forebay has its own kernels"
#define RECOMPUTE "recompute decides what is kept for the backward"
#define COMPUTE   "compute_dtype decides, and master weights are always float32"
#define LOG       "trainer_log.jsonl in output_dir is always written, other reporters are not supported yet"
#define BEST      "checkpoints are not ranked; eval_loss is in trainer_log.jsonl"
#define HUB       "nothing is ever sent anywhere"

const fb_compat fb_compat_key[] = {
    /* what kind of run */
    { "do_train", "true", "the command decides; to evaluate only, use `forebay eval`" },
    { "do_eval", NULL, "eval_strategy with eval_dataset or val_size decides" },
    { "do_predict", "false", "use `forebay generate`" },
    { "finetuning_type", "full", "every weight is trained; lora and freeze are not supported" },
    { "use_cpu", "false", "set backend: cpu instead" },
    { "trust_remote_code", NULL, "code from a checkpoint is never run" },
    { "push_to_hub", "false", HUB },
    /* data */
    { "template", NULL, "the checkpoint's own chat template is used" },
    { "overwrite_cache", NULL, SHARDS },
    { "cache_dir", NULL, SHARDS },
    { "preprocessing_num_workers", NULL, SHARDS },
    { "preprocessing_batch_size", NULL, SHARDS },
    { "dataloader_num_workers", NULL, LOADER },
    { "dataloader_pin_memory", NULL, LOADER },
    { "dataloader_prefetch_factor", NULL, LOADER },
    { "dataloader_persistent_workers", NULL, LOADER },
    { "dataloader_drop_last", "false", "every row is learned" },
    { "remove_unused_columns", NULL, "only the columns that a format names are read" },
    { "group_by_length", "false", "rows are shuffled by seed alone" },
    { "streaming", "false", "a dataset is made into a token shard first" },
    { "neat_packing", "false", "set packing: true instead; packed documents never attend to one another here" },
    { "use_fast_tokenizer", "true", "tokenizer.json is read by the tokenizers library" },
    { "resize_vocab", "false", "the vocabulary is the checkpoint's" },
    { "label_smoothing_factor", "0|0.0", "label smoothing is not supported" },
    { "average_tokens_across_devices", NULL, "the loss is the mean over all learned tokens of a step" },
    /* arithmetic and memory */
    { "bf16", NULL, COMPUTE },
    { "pure_bf16", NULL, COMPUTE },
    { "bf16_full_eval", NULL, COMPUTE },
    { "fp16", "false", "float16 has too small a range without loss scaling; compute_dtype takes bfloat16 or float32" },
    { "fp16_full_eval", "false", "compute_dtype takes bfloat16 or float32" },
    { "tf32", NULL, COMPUTE },
    { "optim", "adamw_torch|adamw_torch_fused", "AdamW with exact float32 state is the only optimizer" },
    { "gradient_checkpointing", NULL, RECOMPUTE },
    { "disable_gradient_checkpointing", NULL, RECOMPUTE },
    { "use_reentrant_gc", NULL, RECOMPUTE },
    { "use_cache", NULL, "training keeps no key-value cache" },
    { "low_cpu_mem_usage", NULL, "weights are read straight into place" },
    { "flash_attn", NULL, KERNELS },
    { "enable_liger_kernel", NULL, KERNELS },
    { "use_liger_kernel", NULL, KERNELS },
    { "use_unsloth", NULL, KERNELS },
    { "torch_compile", NULL, KERNELS },
    { "auto_find_batch_size", "false", "`forebay plan` says whether a batch fits, and what it takes" },
    { "deepspeed", NULL, STREAMS },
    { "fsdp", NULL, STREAMS },
    { "ddp_timeout", NULL, ONE },
    { "ddp_backend", NULL, ONE },
    { "ddp_find_unused_parameters", NULL, ONE },
    { "local_rank", NULL, ONE },
    /* logs and checkpoints */
    { "report_to", "none", LOG },
    { "run_name", NULL, LOG },
    { "logging_dir", NULL, LOG },
    { "plot_loss", NULL, LOG },
    { "logging_strategy", "steps", "a line is written every logging_steps updates" },
    { "logging_first_step", NULL, "a line is written every logging_steps updates" },
    { "log_level", NULL, "progress goes to standard error, always" },
    { "disable_tqdm", NULL, "there is no progress bar, but a line every logging_steps" },
    { "skip_memory_metrics", NULL, "memory is always accounted for" },
    { "include_num_input_tokens_seen", NULL, "tokens are always counted" },
    { "save_safetensors", "true", "weights are written as safetensors only" },
    { "save_only_model", NULL, "a checkpoint always holds the optimizer's state, so that it can be resumed" },
    { "load_best_model_at_end", "false", BEST },
    { "metric_for_best_model", NULL, BEST },
    { "greater_is_better", NULL, BEST },
    { "eval_on_start", "false", "use `forebay eval` before training" },
    { "ignore_data_skip", "false", "a resumed run continues in the data where it stopped" },
};
const size_t fb_compat_count = FB_COUNT(fb_compat_key);
