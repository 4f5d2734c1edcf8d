#include "run/planning.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/thread.h"
#include "config/parse.h"
#include "device/cpu/cpu.h"
#include "device/cuda/planned.h"
#include "io/file.h"
#include "run/saver.h"
#include "train/micro.h"

/* ---- machine ---- */

static bool cached_path(char path[FB_PATH_SIZE])
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    fb_error unused;
    if (cache && *cache)
        return fb_path_join(path, FB_PATH_SIZE, cache, "forebay/machine.json", &unused) == FB_OK;
    return home && *home && fb_path_join(path, FB_PATH_SIZE, home, ".cache/forebay/machine.json", &unused) == FB_OK;
}

/* A device's name is its product's, and after a comma more. */
static bool has_device(const fb_machine *m, const char *device)
{
    size_t n = strcspn(device, ",");
    return strlen(m->device) == n && !strncmp(m->device, device, n);
}

static fb_curve flat(double y)
{
    return (fb_curve){ 1, { 1 }, { y } };
}

/* The order of magnitude of what is sold now: good enough to rank layouts, not to say how long a step takes. */
static fb_machine guess(const fb_device_info *info)
{
    double cores = fb_core_count();
    fb_machine m = { .unified = info->unified, .matmul_rows = { 3, { 128, 1024, 4096 }, { 0.5, 0.95, 1 } },
                     .matmul_accumulate = 0.98,
        .memory = info->memory_total, .overhead = info->memory_overhead, .peak_flops = info->peak_flops, .cores = fb_core_count(),
        .dram = 20e9 + 8e9 * cores, .gather = 5e9, .copy_latency = 5e-6 };
    m.dram_dma = 0.6 * m.dram;
    m.update = (fb_curve){ 2, { 1, cores > 1 ? cores : 2 }, { 4e8, cores > 1 ? 0.8 * m.dram / 26 : 6e8 } };
    if (info->unified) {
        m.matmul_peak = 50e9 * cores, m.memory_rate = m.dram / 2, m.launch = 1e-5;
        m.h2d = m.d2h = flat(8e9), m.h2d_both = m.d2h_both = 5e9;
    } else {
        m.matmul_peak = info->peak_flops > 0 ? 0.7 * info->peak_flops : 60e12, m.memory_rate = 0.8e12, m.launch = 3e-6;
        m.h2d = m.d2h = flat(20e9), m.h2d_both = m.d2h_both = 16e9;
    }
    m.attention_fwd = flat(0.5 * m.matmul_peak), m.attention_bwd = flat(0.35 * m.matmul_peak);
    snprintf(m.name, sizeof m.name, "%.60s", info->name);
    snprintf(m.device, sizeof m.device, "%.*s", (int)strcspn(info->name, ","), info->name);
    return m;
}

void fb_planning_machine(fb_machine *out, char note[FB_MACHINE_NOTE_SIZE], const fb_device_info *info)
{
    char path[FB_PATH_SIZE];
    fb_error unused;
    if (cached_path(path) && fb_file_exists(path) && fb_machine_read(out, path, &unused) == FB_OK && has_device(out, info->name)) {
        snprintf(note, FB_MACHINE_NOTE_SIZE, "rates as measured on this machine by forebay probe");
    } else if (fb_machine_for_device(out, info->name, fb_memory_available(), &unused) == FB_OK) {
        snprintf(note, FB_MACHINE_NOTE_SIZE, "rates of the shipped profile of %.90s; forebay probe measures this one", out->name);
    } else {
        *out = guess(info);
        snprintf(note, FB_MACHINE_NOTE_SIZE, "rates are guessed; run forebay probe --out %.150s",
                 cached_path(path) ? path : "FILE");
    }
    out->unified = info->unified;
}

/* ---- wishes ---- */

/* Dynamic rope looks at each micro-batch: there the cut is part of what is computed, and the plan leaves it alone. */
static uint32_t fixed_cut(const fb_options *o, const fb_manifest *m, uint32_t rows_per_step)
{
    uint32_t batch = o->per_device_train_batch_size < rows_per_step ? o->per_device_train_batch_size : rows_per_step;
    return o->micro_batch == FB_AUTO && m->cfg.rope.type == FB_ROPE_DYNAMIC ? batch : o->micro_batch;
}

fb_status fb_planning_wishes(fb_wishes *out, const fb_options *o, const fb_manifest *m, bool unified, uint32_t rows_per_step,
                             fb_error *err)
{
    static const char some[] = "layers:";
    int64_t n = 0;
    *out = (fb_wishes){ .load = { .rows_per_step = rows_per_step, .update_threads = o->update_threads, .no_overlap = !o->overlap },
        .micro_rows = fixed_cut(o, m, rows_per_step), .recompute = o->recompute == FB_RECOMPUTE_AUTO ? FB_WISH_AUTO : o->recompute,
        .slots = o->slots,
        .n_pass = o->passes, .kept_on_host = o->activations == FB_PLACE_AUTO ? FB_WISH_AUTO : o->activations == FB_PLACE_HOST,
        .acc_on_device = o->accumulators == FB_PLACE_AUTO ? FB_WISH_AUTO : o->accumulators == FB_PLACE_DEVICE };
    if (!strcmp(o->placement, "stream") || (unified && !strcmp(o->placement, "auto")))
        out->placement = FB_HOME_NOTHING;
    else if (!strcmp(o->placement, "resident"))
        out->placement = FB_HOME_EVERYTHING;
    else if (!strncmp(o->placement, some, sizeof some - 1)) {
        if (!fb_parse_int(o->placement + sizeof some - 1, &n) || n < 0 || n > m->cfg.n_layer)
            return fb_fail(err, FB_CONFIG, "placement: '%s' must be layers:N with N from 0 to the model's %u layers", o->placement,
                           m->cfg.n_layer);
        out->placement = FB_HOME_LAYERS;
        out->home_layers = (uint32_t)n;
    }
    return FB_OK;
}

/* ---- the plan ---- */

static uint64_t whole_pieces(uint64_t size)
{
    uint64_t piece = fb_saver_buffer_least();
    return size > piece ? size / piece * piece : piece;
}

static uint64_t left_of_ram(const fb_plan *p, const fb_plan_request *r)
{
    uint64_t taken = p->host_bytes + (r->unified ? p->device_bytes : 0);
    return !r->ram_budget ? UINT64_MAX : r->ram_budget > taken ? r->ram_budget - taken : 0;
}

/* save_buffer: auto takes what the ledger leaves, and no more than it can use.  Where ram_budget is the machine's own, half of
 * that: what is free now is promised to nobody. */
static void grow_save_buffer(fb_plan *p, const fb_plan_request *r, bool has_budget)
{
    fb_region *buffer = &p->host[FB_HOST_SAVE_BUFFER];
    uint64_t most = fb_saver_buffer_most(r->manifest), size = most;
    p->host_bytes -= buffer->size;
    uint64_t left = left_of_ram(p, r) / (has_budget ? 1 : 2);
    if (left < most)
        size = left;
    buffer->size = whole_pieces(size);
    p->host_bytes += buffer->size;
}

fb_status fb_planning_search(fb_plan *out, fb_timeline *t, fb_plan_request *r, const fb_machine *machine, const fb_wishes *w,
                             const fb_options *o, bool saves, fb_error *err)
{
    uint64_t most = fb_saver_buffer_most(r->manifest);
    bool fixed = o->save_buffer != FB_SIZE_MOST;
    r->save_bytes = !saves ? 0 : whole_pieces(!fixed ? 0 : o->save_buffer < most ? o->save_buffer : most);
    fb_error why;
    fb_status st = fb_plan_search(out, t, r, machine, w, NULL, &why);
    if (st == FB_OK && saves && !fixed)
        grow_save_buffer(out, r, o->ram_budget);
    if (st == FB_NOFIT && !fb_plan_device_short(out, r) && r->save_bytes > fb_saver_buffer_least())
        return fb_fail(err, st, "%s; the save buffer takes %.1f MiB of it, save_buffer: auto takes what is left", why.msg,
                       (double)r->save_bytes / 0x1p20);
    return st == FB_OK ? st : fb_fail(err, st, "%s", why.msg);
}

uint64_t fb_planning_runtime(bool unified, uint32_t n_thread, uint64_t driver)
{
    return FB_RUNTIME_BYTES + (unified ? (uint64_t)n_thread * FB_CPU_SCRATCH_SIZE : driver + FB_DRIVER_LATER_BYTES);
}

/* ---- a machine that is not here ---- */

fb_plan_request fb_planning_absent(const fb_options *o, const fb_manifest *m, const fb_machine *machine, uint64_t hbm, uint64_t ram)
{
    bool cpu = machine->unified;
    fb_dtype act = o->compute_dtype != FB_DTYPE_AUTO ? (fb_dtype)o->compute_dtype : cpu ? FB_F32 : FB_BF16;
    fb_plan_request r = { .manifest = m, .act = act, .train = true, .clip = o->max_grad_norm > 0, .row_len = o->cutoff_len,
                          .unified = cpu, .logits_size = cpu ? FB_CPU_LOGITS_SIZE : FB_CUDA_LOGITS_SIZE, .meta_size = fb_micro_size,
        .attention_scratch = cpu ? fb_cpu_attention_scratch : fb_cuda_planned_attention,
        .runtime_bytes = fb_planning_runtime(cpu, machine->cores, FB_DRIVER_BYTES) };
    uint64_t device = hbm ? hbm : o->hbm_budget ? o->hbm_budget : machine->memory;
    r.hbm_budget = device > machine->overhead ? device - machine->overhead : device ? 1 : 0;
    r.ram_budget = ram ? ram : o->ram_budget ? o->ram_budget : machine->ram;
    return r;
}

/* ---- in words ---- */

void fb_layout_describe(const fb_plan *p, const fb_manifest *m, char text[FB_LAYOUT_SIZE])
{
    static const char *const policies[] = { "none", "selective", "full" };
    const fb_layout *l = &p->layout;
    uint32_t n_layer = m->cfg.n_layer, streamed = n_layer - l->home_layers;
    char *at = text;
    const char *end = text + FB_LAYOUT_SIZE;
    *at = 0;
#define SAY(...) do { int n_ = snprintf(at, (size_t)(end - at), __VA_ARGS__); at += n_ > 0 && n_ < end - at ? n_ : 0; } while (0)
    SAY("%u pass%s; ", l->n_pass, l->n_pass > 1 ? "es" : "");
    if (l->home_layers || l->home_embed || l->home_head)
        SAY("%u of %u layers%s%s live on the device", l->home_layers, n_layer, l->home_embed ? ", the embedding" : "",
            l->home_head ? ", the head" : "");
    if (streamed)
        SAY("%s%u stream through %u slot%s", l->home_layers || l->home_embed || l->home_head ? ", " : "all ", streamed, l->slots,
            l->slots > 1 ? "s" : "");
    SAY("; recompute %s", policies[l->recompute]);
    if (l->n_rich)
        SAY(" (%s in the last %u)", policies[l->rich], l->n_rich);
    SAY("; what is kept is on the %s", l->kept_on_host ? "host" : "device");
#undef SAY
}
