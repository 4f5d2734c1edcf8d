/* bench.c - `forebay bench`: real steps of a model of a given shape on synthetic rows, and where their time goes. */
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/random.h"
#include "run/preset.h"
#include "run/session.h"
#include "run/sink.h"

enum { STEPS_DEFAULT = 5, STEPS_MAX = 10000, WARM_UP = 2 };

typedef struct step {
    double   seconds;
    double   loss, grad_norm;
    uint64_t n_token, n_learned;
    fb_trace_account time;
} step;

typedef struct bench {
    const fb_sink *sink;
    fb_options    *o;
    const char    *name;    /* of the model */
    fb_session     session;
    uint32_t       rows, micro_rows, n_micro;
    uint32_t      *ids;     /* [cutoff_len] */
    int32_t       *labels;
    step          *steps;
    uint32_t       n_step, n_warm;
    double         start_up; /* seconds from the process's start to the end of the first step */
    fb_session_memory held;
    uint64_t       host_resident; /* like held.host, with the files that are mapped, libraries first of all */
} bench;

/* Seconds since this process started; its start is known to the hundredth. */
static double process_age(void)
{
    char text[1024];
    struct timespec now;
    unsigned long long ticks;
    FILE *f = fopen("/proc/self/stat", "re");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f)
        fclose(f);
    text[n] = 0;
    char *after_name = strrchr(text, ')'); /* proc(5): field 2 may hold anything; starttime is field 22 */
    if (!after_name
        || sscanf(after_name + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &ticks) != 1)
        return NAN;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec - (double)ticks / (double)sysconf(_SC_CLK_TCK);
}

/* Resident bytes, everything counted: anonymous, files, shared. */
static uint64_t resident_set(void)
{
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f && fscanf(f, "%*u %llu", &pages) != 1)
        pages = 0;
    if (f)
        fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* ---- floating-point operations ---- */

/* The whole step's, in three ways of counting. */
typedef struct flops {
    double model;     /* 6 P T, P all parameters (an untied input embedding too, as the field counts) */
    double attention; /* that, and causal attention: two products forward, four backward */
    double hardware;  /* the products that are really computed: recompute too, the embedding's look-up not */
} flops;

static flops count_flops(const bench *b, const step *s)
{
    const fb_manifest *m = &b->session.manifest;
    const fb_model_config *c = &m->cfg;
    double t = (double)s->n_token, len = b->o->cutoff_len;
    double hidden = c->hidden, q = (double)c->n_head * c->head_dim, kv = (double)c->n_kv_head * c->head_dim, ffn = c->ffn_dim;
    double matrices = c->n_layer * hidden * (q + 2 * kv + q + 3 * ffn), scores = 0, again = 0;
    for (uint32_t l = 0; l < c->n_layer; l++) {
        double w = fb_model_config_window(c, l);
        double keys = w > 0 && w < len ? w - w * w / (2 * len) : len / 2; /* that a query sees, on average */
        scores += 4 * q * keys;
        fb_recompute policy = fb_plan_policy(&b->session.plan, c->n_layer, l);
        if (!fb_value_kept(FB_V_QKV, policy))
            again += 2 * hidden * (q + 2 * kv);
        if (!fb_value_kept(FB_V_O, policy))
            again += 4 * q * keys;
        if (!fb_value_kept(FB_V_H, policy))
            again += 2 * hidden * q;
        if (!fb_value_kept(FB_V_GU, policy))
            again += 4 * hidden * ffn;
    }
    flops f = { .model = 6 * (double)m->n_weight * t };
    f.attention = f.model + 3 * scores * t;
    f.hardware = (6 * matrices + 3 * scores + again) * t + 6 * hidden * c->vocab * (double)s->n_learned;
    return f;
}

/* Bytes that the host's memory moves: an update reads and writes the state and reads the gradient; copies. */
static double host_traffic(const bench *b, const fb_trace_account *a)
{
    double element = b->session.act == FB_BF16 ? 2 * (2 + 2 + 4 + 4) + 2 : 2 * (4 + 4 + 4) + 4;
    return element * (double)a->n_updated + (double)(a->h2d_size + a->d2h_size);
}

/* ---- rows ---- */

/* Full rows of random tokens, every one learned.  Returns the number of micro-batches. */
static uint32_t fill(bench *b, uint32_t number)
{
    uint32_t n = 0, row = 0, len = b->o->cutoff_len;
    uint64_t random = b->o->seed * FB_RANDOM_STEP + number;
    while (row < b->rows) {
        fb_micro *m = fb_engine_micro(b->session.engine, n++);
        fb_micro_begin(m);
        for (uint32_t i = 0; i < b->micro_rows && row < b->rows; i++, row++) {
            for (uint32_t j = 0; j < len; j++) {
                b->ids[j] = (uint32_t)(fb_random_next(&random) % b->session.manifest.cfg.vocab);
                b->labels[j] = (int32_t)b->ids[j];
            }
            fb_micro_add_document(m, b->ids, b->labels, len);
        }
        fb_micro_finish(m);
    }
    return n;
}

/* ---- steps ---- */

static double rate(double amount, double seconds)
{
    return seconds > 0 ? amount / seconds : 0;
}

static double idle_percent(const fb_trace_account *a)
{
    double idle = 0;
    for (int c = 0; c < FB_CAUSE_COUNT; c++)
        idle += a->idle[c];
    return 100 * rate(idle, a->end - a->begin);
}

static void append(char *buf, size_t size, const char *fmt, ...) FB_PRINTF(3, 4);

static void append(char *buf, size_t size, const char *fmt, ...)
{
    size_t n = strlen(buf);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(buf + n, size - n, fmt, ap);
    va_end(ap);
}

/* seconds: of one step; s: counts of one step and the account that shares are taken of. */
static void say_figures(const bench *b, fb_say_kind kind, const char *title, const step *s)
{
    const fb_trace_account *a = &s->time;
    flops f = count_flops(b, s);
    double window = a->end - a->begin;
    char line[1024] = "";
    append(line, sizeof line, "%s  %.3f s  %.0f tokens/s  %.4g TFLOPS (with attention %.4g, hardware %.4g)", title, s->seconds,
           rate((double)s->n_token, s->seconds), 1e-12 * rate(f.model, s->seconds), 1e-12 * rate(f.attention, s->seconds),
           1e-12 * rate(f.hardware, s->seconds));
    if (b->session.info.peak_flops > 0)
        append(line, sizeof line, "  MFU %.1f%%", 100 * rate(f.attention, s->seconds) / b->session.info.peak_flops);
    append(line, sizeof line, "  h2d %.3g d2h %.3g DRAM %.3g GB/s  idle %.2f%%:", 1e-9 * rate((double)a->h2d_size, window),
           1e-9 * rate((double)a->d2h_size, window), 1e-9 * rate(host_traffic(b, a), window), idle_percent(a));
    for (fb_cause c = 0; c < FB_CAUSE_COUNT; c++)
        append(line, sizeof line, "%s %s %.2f", c ? "," : "", fb_cause_str(c), 100 * rate(a->idle[c], window));
    fb_say(b->sink, kind, "%s", line);
}

static fb_status run_steps(bench *b, bool json, fb_error *err)
{
    fb_status st = FB_OK;
    const fb_options *o = b->o;
    fb_engine *e = b->session.engine;
    double before = fb_clock();
    fb_trace_start(b->session.trace);
    for (uint32_t i = 0; i < b->n_step; i++) {
        fb_step_result r;
        fb_adamw a = { .lr = o->learning_rate, .beta1 = o->adam_beta1, .beta2 = o->adam_beta2, .eps = o->adam_epsilon,
                       .weight_decay = o->weight_decay, .step = i + 1 };
        FB_TRY(fb_engine_step(e, fill(b, i), &a, o->max_grad_norm, &r, err));
        double now = fb_clock();
        if (!r.updated)
            FB_TRY(fb_fail(err, FB_NONFINITE, "bench: step %u has loss %g and gradient norm %g; lower learning_rate", i + 1,
                           r.loss_sum / (double)r.n_learned, r.grad_norm));
        if (i == 0)
            b->start_up = process_age();
        b->steps[i] = (step){ now - before, r.loss_sum / (double)r.n_learned, r.grad_norm, r.n_token, r.n_learned,
                              *fb_trace_account_of(b->session.trace) };
        before = now;
        char title[48];
        snprintf(title, sizeof title, "step %u/%u%s", i + 1, b->n_step, i < b->n_warm ? " (not counted)" : "");
        say_figures(b, json ? FB_SAY_PROGRESS : FB_SAY_RESULT, title, &b->steps[i]);
    }
    fb_engine_settle(e);
    uint64_t anonymous = fb_memory_resident();
    b->held = fb_session_measure(&b->session);
    b->host_resident = b->held.host + resident_set() - anonymous;
done:
    return st;
}

static int compare_reals(const void *x, const void *y)
{
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

/* The median of the counted steps' seconds; the account is of all of them together. */
static step summary(const bench *b)
{
    step s = b->steps[b->n_step - 1];
    double seconds[STEPS_MAX];
    uint32_t n = b->n_step - b->n_warm;
    s.time = (fb_trace_account){ 0 };
    for (uint32_t i = 0; i < n; i++) {
        const fb_trace_account *a = &b->steps[b->n_warm + i].time;
        seconds[i] = b->steps[b->n_warm + i].seconds;
        s.time.end += a->end - a->begin;
        s.time.work += a->work;
        for (int c = 0; c < FB_CAUSE_COUNT; c++)
            s.time.idle[c] += a->idle[c];
        s.time.h2d += a->h2d, s.time.d2h += a->d2h, s.time.update += a->update;
        s.time.h2d_size += a->h2d_size, s.time.d2h_size += a->d2h_size, s.time.n_updated += a->n_updated;
        s.time.n_lost = a->n_lost;
    }
    qsort(seconds, n, sizeof *seconds, compare_reals);
    s.seconds = n % 2 ? seconds[n / 2] : (seconds[n / 2 - 1] + seconds[n / 2]) / 2;
    return s;
}

/* ---- the report ---- */

static double bytes_a_parameter(const bench *b, bool with_inputs)
{
    uint64_t inputs = b->session.plan.host[FB_HOST_INPUTS].size;
    uint64_t host = b->host_resident - (with_inputs || inputs > b->host_resident ? 0 : inputs);
    return (double)host / (double)b->session.manifest.n_weight;
}

static void introduce(const bench *b, bool json)
{
    const fb_session *s = &b->session;
    fb_say_kind kind = json ? FB_SAY_PROGRESS : FB_SAY_RESULT;
    fb_say(b->sink, kind, "%s: %.1f M parameters in %u layers, %s; computed in %s on %s (%s)", b->name,
           (double)s->manifest.n_weight / 1e6,
           s->manifest.cfg.n_layer, s->shards ? "the checkpoint's weights" : "random weights", fb_dtype_hf_str(s->act),
           s->device->ops->name, s->info.name);
    char layout[FB_LAYOUT_SIZE];
    fb_layout_describe(&s->plan, &s->manifest, layout);
    fb_say(b->sink, kind, "%u rows of %u tokens a step, %u micro-batch%s of %u; %s; clipping %s", b->rows, b->o->cutoff_len,
           b->n_micro, b->n_micro > 1 ? "es" : "", b->micro_rows, layout, b->o->max_grad_norm > 0 ? "exact" : "off");
    fb_say(b->sink, kind, "a step of %.3g s is foreseen; %s", s->foreseen.seconds, s->machine_note);
    fb_say(b->sink, kind,
           "TFLOPS is 6 P T with P all parameters; MFU counts causal attention too; hardware, what is really computed");
}

static void report_text(const bench *b)
{
    const fb_session *s = &b->session;
    step m = summary(b);
    char title[64];
    snprintf(title, sizeof title, "median of %u", b->n_step - b->n_warm);
    say_figures(b, FB_SAY_RESULT, title, &m);
    fb_say(b->sink, FB_SAY_RESULT, "device memory: planned %.2f GiB, measured %.2f, and %.2f beside it; host: planned %.2f GiB, "
           "measured %.2f, resident with libraries %.2f: %.2f bytes a parameter without block inputs, %.2f with",
           (double)s->plan.device_bytes / 0x1p30, (double)b->held.device / 0x1p30, (double)s->info.memory_overhead / 0x1p30,
           (double)s->plan.host_bytes / 0x1p30, (double)b->held.host / 0x1p30, (double)b->host_resident / 0x1p30,
           bytes_a_parameter(b, false), bytes_a_parameter(b, true));
    fb_device_info info;
    s->device->ops->info(s->device, &info);
    fb_say(b->sink, FB_SAY_RESULT, "attention: %s", info.attention);
    fb_say(b->sink, FB_SAY_RESULT, "start-up: %.2f s from the start of the process to the end of the first step", b->start_up);
    if (m.time.n_lost)
        fb_say(b->sink, FB_SAY_WARNING, "%llu spans did not fit the trace; idle times are short of them",
               (unsigned long long)m.time.n_lost);
}

static json_t *figures(const bench *b, const step *s)
{
    const fb_trace_account *a = &s->time;
    flops f = count_flops(b, s);
    double window = a->end - a->begin, peak = b->session.info.peak_flops;
    json_t *idle = json_object(), *o = json_object();
    for (fb_cause c = 0; c < FB_CAUSE_COUNT; c++)
        json_object_set_new(idle, fb_cause_str(c), fb_json_real(100 * rate(a->idle[c], window)));
    json_object_set_new(o, "seconds", fb_json_real(s->seconds));
    json_object_set_new(o, "tokens_per_second", fb_json_real(rate((double)s->n_token, s->seconds)));
    json_object_set_new(o, "tflops", fb_json_real(1e-12 * rate(f.model, s->seconds)));
    json_object_set_new(o, "tflops_with_attention", fb_json_real(1e-12 * rate(f.attention, s->seconds)));
    json_object_set_new(o, "tflops_hardware", fb_json_real(1e-12 * rate(f.hardware, s->seconds)));
    json_object_set_new(o, "mfu_percent", peak > 0 ? fb_json_real(100 * rate(f.attention, s->seconds) / peak) : json_null());
    json_object_set_new(o, "idle_percent", fb_json_real(idle_percent(a)));
    json_object_set_new(o, "idle_percent_by_cause", idle);
    json_object_set_new(o, "h2d_gb_per_second", fb_json_real(1e-9 * rate((double)a->h2d_size, window)));
    json_object_set_new(o, "d2h_gb_per_second", fb_json_real(1e-9 * rate((double)a->d2h_size, window)));
    json_object_set_new(o, "dram_gb_per_second", fb_json_real(1e-9 * rate(host_traffic(b, a), window)));
    json_object_set_new(o, "h2d_gb_per_second_while_copying", fb_json_real(1e-9 * rate((double)a->h2d_size, a->h2d)));
    json_object_set_new(o, "d2h_gb_per_second_while_copying", fb_json_real(1e-9 * rate((double)a->d2h_size, a->d2h)));
    json_object_set_new(o, "update_worker_seconds", fb_json_real(a->update));
    json_object_set_new(o, "window_seconds", fb_json_real(window));
    return o;
}

static json_t *memory_json(const bench *b)
{
    const fb_session *s = &b->session;
    return json_pack("{s:{s:I, s:I, s:I}, s:{s:I, s:I, s:I, s:I}, s:f, s:f}",
        "device", "planned", (json_int_t)s->plan.device_bytes, "measured", (json_int_t)b->held.device,
        "overhead", (json_int_t)s->info.memory_overhead,
        "host", "planned", (json_int_t)s->plan.host_bytes, "measured", (json_int_t)b->held.host,
        "resident", (json_int_t)b->host_resident,
        "block_inputs", (json_int_t)s->plan.host[FB_HOST_INPUTS].size,
        "bytes_per_parameter", bytes_a_parameter(b, false), "bytes_per_parameter_with_block_inputs", bytes_a_parameter(b, true));
}

static fb_status report_json(const bench *b, fb_error *err)
{
    const fb_session *s = &b->session;
    step m = summary(b);
    json_t *steps = json_array();
    for (uint32_t i = 0; i < b->n_step; i++) {
        json_t *one = figures(b, &b->steps[i]);
        json_object_set_new(one, "loss", fb_json_real(b->steps[i].loss));
        json_object_set_new(one, "grad_norm", fb_json_real(b->steps[i].grad_norm));
        json_object_set_new(one, "counted", json_boolean(i >= b->n_warm));
        json_array_append_new(steps, one);
    }
    char *options = fb_options_json(b->o);
    json_t *root = json_pack("{s:f, s:s, s:I, s:s, s:s, s:s, s:I, s:i, s:i, s:i, s:b, s:o, s:o, s:o, s:o, s:o, s:I, s:o*}",
        "seconds_foreseen", s->foreseen.seconds, "model", b->name, "parameters", (json_int_t)s->manifest.n_weight, "backend",
        s->device->ops->name, "device", s->info.name,
        "compute_dtype", fb_dtype_hf_str(s->act), "tokens_per_step", (json_int_t)b->steps[0].n_token,
        "micro_batches", (int)b->n_micro, "passes", (int)s->plan.layout.n_pass, "slots", (int)s->plan.layout.slots,
        "block_inputs_on_host", s->plan.layout.kept_on_host, "peak_tflops",
        s->info.peak_flops > 0 ? fb_json_real(1e-12 * s->info.peak_flops) : json_null(),
        "median", figures(b, &m), "steps", steps, "memory", memory_json(b), "start_up_seconds", fb_json_real(b->start_up),
        "spans_lost", (json_int_t)m.time.n_lost, "options", options ? json_loads(options, 0, NULL) : NULL);
    free(options);
    return fb_say_json(b->sink, root, err);
}

/* ---- set-up ---- */

/* The bench's own defaults come first: of one key the last word counts. */
static fb_status read_options(fb_options *o, const fb_bench_request *r, const fb_sink *sink, fb_error *err)
{
    static const char *const defaults[] = { "cutoff_len=1024", "learning_rate=1e-6" };
    int n = (int)FB_COUNT(defaults) + r->n_override;
    const char **all = calloc((size_t)n, sizeof *all);
    if (!all)
        return fb_fail(err, FB_NOMEM, "bench: no memory for its options");
    memcpy(all, defaults, sizeof defaults);
    for (int i = 0; i < r->n_override; i++)
        all[FB_COUNT(defaults) + (size_t)i] = r->overrides[i];
    fb_status st = fb_options_read(o, NULL, all, n, fb_say_warning, (void *)sink, err);
    free(all);
    return st;
}

static fb_status open_model(bench *b, const fb_bench_request *r, fb_error *err)
{
    char config[FB_PRESET_SIZE], known[256];
    fb_preset_names(known, sizeof known);
    if (r->preset && r->model_dir)
        return fb_fail(err, FB_CONFIG, "bench: a preset (%s) and a model's folder (%s) are given; give one", r->preset,
                       r->model_dir);
    b->name = r->preset ? r->preset : r->model_dir;
    if (!b->name)
        return fb_fail(err, FB_CONFIG, "bench: which shape?  Give --model DIR or --preset NAME, one of %s", known);
    if (!r->preset)
        return fb_session_open(&b->session, r->model_dir, err);
    fb_status st = fb_preset_config(config, r->preset, err);
    return st != FB_OK ? st : fb_session_open_shape(&b->session, config, r->preset, err);
}

fb_status fb_bench(const fb_bench_request *r, const fb_sink *sink, fb_error *err)
{
    fb_status st = FB_OK;
    fb_options o = { 0 };
    bench b = { .sink = sink, .o = &o, .n_step = r->n_step ? r->n_step : STEPS_DEFAULT };
    if (b.n_step > STEPS_MAX)
        return fb_fail(err, FB_CONFIG, "bench: %u steps are asked for; 1 to %d are possible", r->n_step, STEPS_MAX);
    b.n_warm = b.n_step > WARM_UP ? WARM_UP : b.n_step - 1;
    FB_TRY(read_options(&o, r, sink, err));
    FB_TRY(open_model(&b, r, err));
    fb_session_request q = { .options = &o, .train = true, .row_len = o.cutoff_len, .alias_host = r->alias_host,
                             .trace_steps = o.trace ? b.n_step : 1 };
    b.ids = calloc(o.cutoff_len, sizeof *b.ids);
    b.labels = calloc(o.cutoff_len, sizeof *b.labels);
    b.steps = calloc(b.n_step, sizeof *b.steps);
    if (!b.ids || !b.labels || !b.steps)
        FB_TRY(fb_fail(err, FB_NOMEM, "bench: no memory for rows of %u tokens", o.cutoff_len));
    fb_session_batch(&o, &q.rows_per_step, &q.micro_rows, &q.n_micro);
    FB_TRY(fb_session_plan(&b.session, &q, err));
    b.rows = q.rows_per_step, b.micro_rows = q.micro_rows, b.n_micro = q.n_micro;
    introduce(&b, r->json);
    FB_TRY(fb_session_start(&b.session, &q, err));
    FB_TRY(run_steps(&b, r->json, err));
    if (r->json)
        FB_TRY(report_json(&b, err));
    else
        report_text(&b);
    if (o.trace) {
        FB_TRY(fb_trace_write(b.session.trace, o.trace, err));
        fb_say(sink, FB_SAY_PROGRESS, "the trace is in %s: open it in ui.perfetto.dev or chrome://tracing", o.trace);
    }
done:
    fb_session_close(&b.session);
    fb_options_free(&o);
    free(b.ids);
    free(b.labels);
    free(b.steps);
    return st;
}
