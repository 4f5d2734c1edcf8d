#include "run/session.h"

#include <stdio.h>

#include "base/memory.h"
#include "device/cpu/cpu.h"
#include "io/file.h"
#include "run/saver.h"

/* What the process holds beside the ledger's other lines: code, libraries' heaps, thread stacks. */
static const uint64_t RUNTIME_BYTES = 8u << 20;

void fb_session_batch(const fb_options *o, uint32_t *rows_per_step, uint32_t *micro_rows, uint32_t *n_micro)
{
    *rows_per_step = o->per_device_train_batch_size * o->gradient_accumulation_steps;
    *micro_rows = o->micro_batch != FB_AUTO ? o->micro_batch : o->per_device_train_batch_size;
    if (*micro_rows > *rows_per_step)
        *micro_rows = *rows_per_step;
    *n_micro = (*rows_per_step + *micro_rows - 1) / *micro_rows;
}

fb_status fb_session_open(fb_session *s, const char *model_dir, fb_error *err)
{
    fb_status st = FB_OK;
    *s = (fb_session){ 0 };
    FB_TRY(fb_manifest_read(&s->manifest, model_dir, err));
    FB_TRY(fb_shard_set_open(&s->shards, model_dir, err));
    FB_TRY(fb_manifest_check(&s->manifest, s->shards, err));
done:
    if (st != FB_OK)
        fb_session_close(s);
    return st;
}

fb_status fb_session_open_shape(fb_session *s, const char *config_json, const char *name, fb_error *err)
{
    fb_model_config cfg;
    *s = (fb_session){ 0 };
    fb_status st = fb_model_config_parse(&cfg, config_json, name, err);
    return st != FB_OK ? st : fb_manifest_build(&s->manifest, &cfg, err);
}

static fb_status open_device(fb_session *s, const fb_options *o, fb_error *err)
{
    fb_status st = fb_device_open(&s->device, &(fb_device_options){ .backend = o->backend, .index = o->device,
        .n_thread = o->compute_threads, .memory_max = o->hbm_budget, .deterministic = o->full_determinism,
        .inline_run = !o->overlap }, err);
    if (st == FB_OK)
        s->device->ops->info(s->device, &s->info);
    return st;
}

/* Bytes for the arena: what the user allows, else what is free, less what the back end takes beside it.  0: no limit. */
static uint64_t arena_budget(const fb_session *s, const fb_options *o)
{
    uint64_t budget = o->hbm_budget ? o->hbm_budget : s->info.memory_free;
    return budget > s->info.memory_overhead ? budget - s->info.memory_overhead : budget ? 1 : 0;
}

/* The buffer of checkpoints takes what the ledger leaves, and no more than it can use.  Where ram_budget is the machine's own, half
 * of that: what is free now is promised to nobody. */
static fb_status add_save_buffer(fb_session *s, const fb_session_request *r, uint64_t ram_budget, fb_error *err)
{
    const fb_options *o = r->options;
    fb_plan *p = &s->plan;
    uint64_t taken = p->host_bytes + (s->info.unified ? p->device_bytes : 0), left = ram_budget > taken ? ram_budget - taken : 0;
    uint64_t most = fb_saver_buffer_most(&s->manifest), least = fb_saver_buffer_least(), size = most;
    if (!ram_budget)
        left = UINT64_MAX;
    if (o->save_buffer == FB_SIZE_MOST && left / (o->ram_budget ? 1 : 2) < most)
        size = left / (o->ram_budget ? 1 : 2);
    else if (o->save_buffer < most)
        size = o->save_buffer;
    size = size / least * least;
    size = size < least ? least : size;
    p->host[FB_HOST_SAVE_BUFFER].size = size;
    p->host_bytes += size;
    if (size > left)
        return fb_fail(err, FB_NOFIT, "plan: the save buffer takes %.1f MiB, ram_budget leaves %.1f MiB for it; raise ram_budget, "
                       "or set %s", (double)size / 0x1p20, (double)left / 0x1p20, size > least ? "save_buffer: auto" : "save_strategy: no");
    return FB_OK;
}

fb_status fb_session_plan(fb_session *s, const fb_session_request *r, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_options *o = r->options;
    const fb_model_config *c = &s->manifest.cfg;
    if (!s->device)
        FB_TRY(open_device(s, o, err));
    s->act = o->compute_dtype == FB_DTYPE_AUTO ? s->info.dtype : (fb_dtype)o->compute_dtype;
    uint32_t n_thread = o->compute_threads ? o->compute_threads : fb_core_count();
    fb_plan_request p = {
        .manifest = &s->manifest, .act = s->act, .train = r->train, .clip = o->max_grad_norm > 0, .recompute = (fb_recompute)o->recompute,
        .slots = o->slots, .row_len = r->row_len, .micro_rows = r->micro_rows, .n_micro = r->n_micro, .cache_len = r->cache_len,
        .unified = s->info.unified, .logits_size = s->info.logits_size,
        .attention_scratch = s->device->kernels->attention_scratch(r->row_len * r->micro_rows, c->n_head, c->head_dim),
        .meta_size = fb_micro_size, .runtime_bytes = RUNTIME_BYTES + (s->info.unified ? (uint64_t)n_thread * FB_CPU_SCRATCH_SIZE : 0),
        .hbm_budget = arena_budget(s, o), .ram_budget = o->ram_budget ? o->ram_budget : fb_memory_available(),
    };
    s->step_flops = fb_plan_step_flops(&p);
    FB_TRY(fb_plan_build(&s->plan, &p, err));
    if (r->train && r->saves)
        FB_TRY(add_save_buffer(s, r, p.ram_budget, err));
done:
    return st;
}

fb_status fb_session_start(fb_session *s, const fb_session_request *r, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_options *o = r->options;
    uint32_t n_core = fb_core_count();
    if (!fb_adamw_select(o->update_kernel))
        FB_TRY(fb_fail(err, FB_CONFIG, "update_kernel: this processor has no '%s'; use auto", o->update_kernel));
    FB_TRY(fb_team_new(&s->team, n_core, "host", err));
    FB_TRY(fb_state_init(&s->state, &s->manifest, &s->plan, s->act, s->device, s->team, err));
    if (s->shards && !r->resumes)
        FB_TRY(fb_state_load(&s->state, s->shards, s->team, err));
    if (!s->shards)
        fb_state_randomize(&s->state, o->seed, s->team);
    fb_shard_set_close(s->shards);
    s->shards = NULL;
    uint32_t update_threads = o->update_threads ? o->update_threads : n_core;
    if (r->trace_steps)
        FB_TRY(fb_trace_new(&s->trace, &(fb_trace_options){ .device = s->device, .n_span = fb_engine_trace_spans(&s->plan, &s->manifest),
            .n_block = s->manifest.n_block, .n_slot = s->plan.slots, .n_worker = update_threads, .n_step = r->trace_steps }, err));
    FB_TRY(fb_engine_new(&s->engine, &(fb_engine_options){ .plan = &s->plan, .device = s->device, .state = &s->state,
        .team = s->team, .act = s->act, .recompute = (fb_recompute)o->recompute, .train = r->train,
        .clip = o->max_grad_norm > 0, .overlap = o->overlap, .n_micro = r->n_micro,
        .update_threads = update_threads, .trace = s->trace }, err));
done:
    return st; /* what has been opened is closed by fb_session_close */
}

void fb_session_close(fb_session *s)
{
    fb_engine_free(s->engine);
    fb_trace_free(s->trace);
    if (s->state.device)
        fb_state_deinit(&s->state);
    if (s->device)
        s->device->ops->close(s->device);
    fb_team_free(s->team);
    fb_shard_set_close(s->shards);
    fb_manifest_free(&s->manifest);
    *s = (fb_session){ 0 };
}

fb_session_memory fb_session_measure(const fb_session *s)
{
    fb_session_memory held;
    uint64_t now;
    s->device->ops->memory(s->device, &now, &held.device);
    held.host = fb_memory_resident();
    if (s->info.unified)
        held.host -= held.host > now ? now : held.host;
    return held;
}

fb_status fb_session_write_memory(const fb_session *s, const char *dir, fb_error *err)
{
    fb_session_memory held = fb_session_measure(s);
    char path[FB_PATH_SIZE], text[512];
    int n = snprintf(text, sizeof text, "{\n  \"device\": {\"planned\": %llu, \"measured\": %llu},\n"
                     "  \"host\": {\"planned\": %llu, \"measured\": %llu}\n}\n", (unsigned long long)s->plan.device_bytes,
                     (unsigned long long)held.device, (unsigned long long)s->plan.host_bytes, (unsigned long long)held.host);
    fb_status st = fb_path_join(path, sizeof path, dir, "memory.json", err);
    return st != FB_OK ? st : fb_file_write_atomic(path, text, (uint64_t)n, err);
}
