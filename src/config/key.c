#include "config/key.h"

#include "config/compat.h"
#include "config/parse.h"

#include <assert.h>
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fb_choice stages[] = { { "sft", FB_STAGE_SFT }, { "pt", FB_STAGE_PT }, { 0 } };
static const fb_choice strategies[] = { { "no", FB_SAVE_NO }, { "steps", FB_SAVE_STEPS }, { "epoch", FB_SAVE_EPOCH }, { 0 } };
static const fb_choice recomputes[] = { { "auto", FB_RECOMPUTE_AUTO }, { "none", FB_RECOMPUTE_NONE },
                                        { "selective", FB_RECOMPUTE_SELECTIVE },
                                     { "full", FB_RECOMPUTE_FULL }, { 0 } };
static const fb_choice places[] = { { "auto", FB_PLACE_AUTO }, { "device", FB_PLACE_DEVICE }, { "host", FB_PLACE_HOST }, { 0 } };
static const fb_choice placements[] = { { "auto", 0 }, { "stream", 0 }, { "resident", 0 }, { "layers:*", 0 }, { 0 } };
static const fb_choice save_dtypes[] = { { "auto", FB_DTYPE_AUTO }, { "float32", FB_F32 }, { "float16", FB_F16 },
                                      { "bfloat16", FB_BF16 }, { 0 } };
static const fb_choice compute_dtypes[] = { { "auto", FB_DTYPE_AUTO }, { "float32", FB_F32 }, { "bfloat16", FB_BF16 }, { 0 } };
static const fb_choice schedules[] = {
    { "linear", FB_LR_LINEAR }, { "cosine", FB_LR_COSINE }, { "cosine_with_min_lr", FB_LR_COSINE_WITH_MIN_LR },
    { "constant", FB_LR_CONSTANT }, { "constant_with_warmup", FB_LR_CONSTANT_WITH_WARMUP },
    { "warmup_stable_decay", FB_LR_WARMUP_STABLE_DECAY }, { 0 } };
static_assert(FB_COUNT(schedules) == FB_LR_COUNT + 1, "a schedule without a name");
static const fb_choice shapes[] = { { "linear", FB_LR_SHAPE_LINEAR }, { "cosine", FB_LR_SHAPE_COSINE },
                                 { "1-sqrt", FB_LR_SHAPE_1_SQRT }, { 0 } };
static_assert(FB_COUNT(shapes) == FB_LR_SHAPE_COUNT + 1, "a shape without a name");
static const fb_choice backends[] = { { "auto", 0 }, { "cpu", 0 }, { "cuda", 0 }, { "fault:*", 0 }, { 0 } };
static const fb_choice update_kernels[] = { { "auto", 0 }, { "scalar", 0 }, { "avx2", 0 }, { "avx512", 0 }, { 0 } };

/* A row whose field has another type than its kind does not compile. */
#define FIELD(name, type) offsetof(fb_options, name) + 0 * sizeof(_Generic(((fb_options *)0)->name, type: 0))
#define ROW(n, kind, type, fallback, help, ...) { #n, FB_KIND_##kind, FIELD(n, type), fallback, help, __VA_ARGS__ }
#define KEY_BOOL(n, fallback, help)                ROW(n, BOOL, bool, fallback, help, 0, 0, NULL, 0, 0)
#define KEY_U32(n, fallback, lo, hi, flags, help)  ROW(n, U32, uint32_t, fallback, help, lo, hi, NULL, flags, 0)
#define KEY_U64(n, fallback, lo, help)             ROW(n, U64, uint64_t, fallback, help, lo, INFINITY, NULL, 0, 0)
#define KEY_I64(n, fallback, lo, help)             ROW(n, I64, int64_t, fallback, help, lo, INFINITY, NULL, 0, 0)
#define KEY_REAL(n, fallback, lo, hi, flags, help) ROW(n, REAL, double, fallback, help, lo, hi, NULL, flags, 0)
#define KEY_SIZE(n, flags, help)                   ROW(n, SIZE, uint64_t, "auto", help, 0, 0, NULL, flags, 0)
#define KEY_CHOICE(n, fallback, choices, help)     ROW(n, CHOICE, int, fallback, help, 0, 0, choices, 0, 0)
#define KEY_TEXT(n, fallback, choices, flags, help) ROW(n, TEXT, char *, fallback, help, 0, 0, choices, flags, 0)
/* The same for what transformers takes in lr_scheduler_kwargs. */
#define SCHED_U64(n, sched, lo, help)                    ROW(n, U64, uint64_t, NULL, help, lo, INFINITY, NULL, 0, sched)
#define SCHED_REAL(n, fallback, sched, lo, hi, help)     ROW(n, REAL, double, fallback, help, lo, hi, NULL, 0, sched)
#define SCHED_CHOICE(n, fallback, sched, choices, help)  ROW(n, CHOICE, int, fallback, help, 0, 0, choices, 0, sched)

#define SCHED(type) (1u << FB_LR_##type)
#define COSINES     (SCHED(COSINE) | SCHED(COSINE_WITH_MIN_LR) | SCHED(WARMUP_STABLE_DECAY))
#define U32_MAX     (UINT32_MAX - 1) /* UINT32_MAX is FB_SLOTS_ALL */

const fb_key fb_key_table[] = {
    /* model and data */
    KEY_TEXT(model_name_or_path, NULL, NULL, 0, "folder of the Hugging Face checkpoint"),
    KEY_TEXT(dataset, NULL, NULL, FB_KEY_LIST, "data file, or names in dataset_dir/dataset_info.json"),
    KEY_TEXT(dataset_dir, "data", NULL, 0, "folder of dataset_info.json and of relative data files"),
    KEY_TEXT(eval_dataset, NULL, NULL, FB_KEY_LIST, "as dataset, for evaluation"),
    KEY_REAL(val_size, "0", 0, 1e12, 0, "rows held out for evaluation: a fraction below 1, or their number"),
    KEY_CHOICE(stage, "sft", stages, "sft learns the answers, pt learns all text"),
    KEY_U32(cutoff_len, "2048", 2, U32_MAX, 0, "tokens in a row; longer rows are cut"),
    KEY_BOOL(packing, NULL, "put several documents into a row; default: true for pt, false for sft"),
    KEY_BOOL(disable_shuffling, "false", "keep the order of the file"),
    KEY_BOOL(train_on_prompt, "false", "learn the prompt too"),
    KEY_BOOL(mask_history, "false", "learn only the last answer of a conversation"),
    KEY_TEXT(system, NULL, NULL, FB_KEY_MAY_EMPTY, "system message for rows without one; default: the chat template's"),
    KEY_U64(max_samples, NULL, 1, "use at most this many rows of each dataset"),
    /* batch */
    KEY_U32(per_device_train_batch_size, "1", 1, U32_MAX, 0, "rows in a batch"),
    KEY_U32(per_device_eval_batch_size, NULL, 1, U32_MAX, 0, "rows in an evaluation batch; default: the training one"),
    KEY_U32(gradient_accumulation_steps, "1", 1, U32_MAX, 0, "batches in an update"),
    KEY_U32(micro_batch, "auto", 1, U32_MAX, FB_KEY_AUTO, "rows that one kernel launch sees; auto: the plan chooses"),
    /* optimizer and schedule */
    KEY_REAL(learning_rate, "5e-5", 0, 1000, 0, "peak learning rate"),
    KEY_CHOICE(lr_scheduler_type, "linear", schedules, "learning-rate schedule"),
    SCHED_REAL(min_lr, NULL, SCHED(COSINE_WITH_MIN_LR), 0, 1000, "final learning rate"),
    SCHED_REAL(min_lr_rate, NULL, SCHED(COSINE_WITH_MIN_LR), 0, 1, "final learning rate as a part of the peak"),
    SCHED_U64(num_stable_steps, SCHED(WARMUP_STABLE_DECAY), 1, "updates at the peak; default: what warm-up and decay leave"),
    SCHED_U64(num_decay_steps, SCHED(WARMUP_STABLE_DECAY), 1, "updates of the decay"),
    SCHED_REAL(min_lr_ratio, "0", SCHED(WARMUP_STABLE_DECAY), 0, 1, "first and final learning rate as a part of the peak"),
    SCHED_CHOICE(warmup_type, "linear", SCHED(WARMUP_STABLE_DECAY), shapes, "shape of the warm-up"),
    SCHED_CHOICE(decay_type, "cosine", SCHED(WARMUP_STABLE_DECAY), shapes, "shape of the decay"),
    SCHED_REAL(num_cycles, "0.5", COSINES, 0, 1e6, "waves of the cosine; 0.5: down once"),
    KEY_REAL(warmup_ratio, "0", 0, 1, 0, "warm-up as a part of all updates"),
    KEY_U64(warmup_steps, "0", 0, "warm-up in updates, wins over warmup_ratio, which takes a fraction"),
    KEY_REAL(num_train_epochs, "3", 0, 1e9, 0, "times through the data"),
    KEY_I64(max_steps, "-1", -1, "updates in all, wins over num_train_epochs; -1: by epochs"),
    KEY_REAL(weight_decay, "0", 0, 1000, 0, "AdamW's decay, on matrices only"),
    KEY_REAL(adam_beta1, "0.9", 0, 1, FB_KEY_BELOW, "AdamW's beta1"),
    KEY_REAL(adam_beta2, "0.999", 0, 1, FB_KEY_BELOW, "AdamW's beta2"),
    KEY_REAL(adam_epsilon, "1e-8", 1e-30, 1, 0, "AdamW's epsilon"),
    KEY_REAL(max_grad_norm, "1", 0, 1e30, 0, "clip the global gradient norm; 0: no clipping"),
    KEY_U64(seed, "42", 0, "seed of the shuffle"),
    /* output */
    KEY_TEXT(output_dir, NULL, NULL, 0, "folder of checkpoints, log and final model"),
    KEY_BOOL(overwrite_output_dir, "false", "start afresh in a folder that holds checkpoints or a finished model"),
    KEY_U32(logging_steps, "10", 1, U32_MAX, 0, "updates between lines of trainer_log.jsonl"),
    KEY_CHOICE(save_strategy, "steps", strategies, "when to save a checkpoint"),
    KEY_U32(save_steps, "500", 1, U32_MAX, 0, "updates between checkpoints"),
    KEY_U32(save_total_limit, "0", 0, U32_MAX, 0, "newest checkpoints to keep; 0: all"),
    KEY_SIZE(save_buffer, FB_KEY_AUTO_MOST, "host memory for what a checkpoint has not written yet; auto: what ram_budget leaves"),
    KEY_CHOICE(save_dtype, "auto", save_dtypes, "dtype of saved weights; auto: the checkpoint's"),
    KEY_CHOICE(eval_strategy, "no", strategies, "when to evaluate; eval_steps alone means steps"),
    KEY_U32(eval_steps, NULL, 1, U32_MAX, 0, "updates between evaluations; default: logging_steps"),
    KEY_TEXT(resume_from_checkpoint, NULL, NULL, FB_KEY_SWITCH,
             "true: the newest checkpoint in output_dir; or a checkpoint's folder"),
    KEY_U32(nonfinite_limit, "3", 1, U32_MAX, 0, "updates in a row that are not finite before the run stops"),
    /* how it runs, never what is learned */
    KEY_TEXT(backend, "auto", backends, 0, "device back end"),
    KEY_U32(device, "0", 0, 1023, 0, "number of the device"),
    KEY_CHOICE(compute_dtype, "auto", compute_dtypes, "auto: bfloat16 on cuda, float32 on cpu"),
    KEY_SIZE(hbm_budget, FB_KEY_AUTO, "device memory to use; auto: what is free (cpu: no limit)"),
    KEY_SIZE(ram_budget, FB_KEY_AUTO, "host memory to use; auto: what the machine has"),
    KEY_TEXT(placement, "auto", placements, 0,
             "blocks that live on the device: auto, none (stream), all (resident), the first (layers:N)"),
    KEY_U32(slots, "auto", 1, U32_MAX, FB_KEY_ALL | FB_KEY_AUTO, "device buffers that blocks stream through"),
    KEY_U32(passes, "auto", 1, U32_MAX, FB_KEY_AUTO, "parts of a step that go through all blocks one after the other"),
    KEY_CHOICE(activations, "auto", places, "where what the forward keeps waits for the backward"),
    KEY_CHOICE(accumulators, "auto", places, "where gradients of streamed blocks wait between passes"),
    KEY_BOOL(overlap, "true", "copy while computing"),
    KEY_CHOICE(recompute, "auto", recomputes, "what the backward computes again: nothing, the cheap part, all of a block"),
    KEY_U32(compute_threads, "auto", 0, 65536, FB_KEY_AUTO, "threads of the cpu back end; auto: all cores"),
    KEY_U32(update_threads, "auto", 0, 65536, FB_KEY_AUTO, "threads of the optimizer; auto: all cores"),
    KEY_TEXT(update_kernel, "auto", update_kernels, 0, "AdamW kernel; auto: the fastest that this machine runs"),
    KEY_BOOL(full_determinism, "false", "the same bits from run to run, at any cost in speed"),
    KEY_U32(watchdog, "120", 0, 86400, 0, "seconds without movement before a run says what it waits for; 0: never"),
    KEY_TEXT(trace, NULL, NULL, 0, "file to write the last steps' time line into, for Perfetto"),
};
static_assert(FB_COUNT(fb_key_table) == FB_KEY_COUNT, "FB_KEY_COUNT is the number of rows");

static const struct {
    const char *name, *means;
} alias[] = { { "evaluation_strategy", "eval_strategy" } };

const fb_key *fb_key_find(const char *name)
{
    for (size_t i = 0; i < FB_COUNT(alias); i++)
        if (!strcmp(name, alias[i].name))
            name = alias[i].means;
    for (size_t i = 0; i < FB_KEY_COUNT; i++)
        if (!strcmp(name, fb_key_table[i].name))
            return &fb_key_table[i];
    return NULL;
}

/* ---- the nearest name ---- */

enum { NAME_MAX_LENGTH = 64 };

static unsigned least(unsigned a, unsigned b)
{
    return a < b ? a : b;
}

/* Insertions, deletions, substitutions and swaps of neighbours between a and b (Damerau 1964; the restricted form, in
 * which no piece is edited twice); case does not count.  Both at most NAME_MAX_LENGTH long. */
static unsigned edit_distance(const char *a, const char *b)
{
    size_t   n = strlen(a), m = strlen(b);
    unsigned rows[3][NAME_MAX_LENGTH + 1], *before = rows[0], *last = rows[1], *now = rows[2];
    for (unsigned j = 0; j <= m; j++)
        last[j] = before[j] = j;
    for (size_t i = 1; i <= n; i++) {
        now[0] = (unsigned)i;
        for (size_t j = 1; j <= m; j++) {
            int x = tolower((unsigned char)a[i - 1]), y = tolower((unsigned char)b[j - 1]);
            now[j] = least(least(last[j], now[j - 1]) + 1, last[j - 1] + (x != y));
            if (i > 1 && j > 1 && x == tolower((unsigned char)b[j - 2]) && tolower((unsigned char)a[i - 2]) == y)
                now[j] = least(now[j], before[j - 2] + 1);
        }
        unsigned *spare = before;
        before = last, last = now, now = spare;
    }
    return last[m];
}

/* At equal distance real keys win over keys that change nothing. */
const char *fb_key_nearest(const char *name, bool kwargs)
{
    const char *best = NULL;
    size_t      length = strlen(name);
    if (length > NAME_MAX_LENGTH)
        return NULL;
    unsigned best_distance = 2 + (unsigned)length / 4; /* a quarter of the letters may be wrong, and one more */
    for (size_t i = 0; i < FB_KEY_COUNT + fb_compat_count; i++) {
        const char *candidate = i < FB_KEY_COUNT ? fb_key_table[i].name : fb_compat_key[i - FB_KEY_COUNT].name;
        if (kwargs && (i >= FB_KEY_COUNT || !fb_key_table[i].schedules))
            continue;
        unsigned d = edit_distance(name, candidate);
        if (d < best_distance && d < length) {
            best_distance = d;
            best = candidate;
        }
    }
    return best;
}

/* ---- values ---- */

/* "fault:*" takes any text that goes on after the colon. */
static bool choice_takes(const fb_choice *c, const char *text)
{
    size_t n = strlen(c->name);
    if (c->name[n - 1] == '*')
        return !strncmp(text, c->name, n - 1) && text[n - 1];
    return !strcmp(text, c->name);
}

const char *fb_key_expectation(char buf[FB_EXPECTATION_SIZE], const fb_key *k)
{
    int n = 0;
#define SAY(...) (n += snprintf(buf + n, (size_t)(FB_EXPECTATION_SIZE - n), __VA_ARGS__), assert(n < FB_EXPECTATION_SIZE))
    if (k->choice) {
        SAY("one of ");
        for (const fb_choice *c = k->choice; c->name; c++)
            SAY("%s%s", c->name, c[1].name ? ", " : "");
        return buf;
    }
    switch (k->kind) {
    case FB_KIND_BOOL:
        SAY("true or false");
        break;
    case FB_KIND_SIZE:
        SAY("a number of bytes such as 1000000, 384MiB or 16GB");
        break;
    case FB_KIND_TEXT:
        SAY("text");
        break;
    default:
        SAY("a %snumber of at least %.12g", k->kind == FB_KIND_REAL ? "" : "whole ", k->lo);
        if (isfinite(k->hi) && k->hi < U32_MAX)
            SAY(" and %s %.12g", k->flags & FB_KEY_BELOW ? "below" : "at most", k->hi);
    }
    if (k->flags & (FB_KEY_AUTO | FB_KEY_AUTO_MOST | FB_KEY_ALL))
        SAY(", or %s", !(k->flags & FB_KEY_ALL) ? "auto" : k->flags & FB_KEY_AUTO ? "auto, or all" : "all");
#undef SAY
    return buf;
}

static bool in_range(const fb_key *k, double value)
{
    return value >= k->lo && (k->flags & FB_KEY_BELOW ? value < k->hi : value <= k->hi);
}

static fb_status set_text(fb_options *o, const fb_key *k, const char *text)
{
    if (k->choice) {
        const fb_choice *c = k->choice;
        while (c->name && !choice_takes(c, text))
            c++;
        if (!c->name)
            return FB_CONFIG;
    }
    bool on;
    if (k->flags & FB_KEY_SWITCH && fb_parse_bool(text, &on))
        text = on ? "true" : "false";
    char **at = fb_key_field(o, k), *copy = strdup(text);
    if (!copy)
        return FB_NOMEM;
    free(*at);
    *at = copy;
    return FB_OK;
}

/* Stores a number that is already known to fit the kind. */
static void store(fb_options *o, const fb_key *k, int64_t value)
{
    void *at = fb_key_field(o, k);
    switch (k->kind) {
    case FB_KIND_U32:
        *(uint32_t *)at = (uint32_t)value;
        break;
    case FB_KIND_I64:
        *(int64_t *)at = value;
        break;
    case FB_KIND_CHOICE:
        *(int *)at = (int)value;
        break;
    default:
        assert(k->kind == FB_KIND_U64 || k->kind == FB_KIND_SIZE);
        *(uint64_t *)at = (uint64_t)value;
    }
}

fb_status fb_key_set(fb_options *o, const fb_key *k, const char *text)
{
    void   *at = fb_key_field(o, k);
    int64_t whole;
    double  real;
    if (k->flags & FB_KEY_AUTO && !strcmp(text, "auto")) {
        store(o, k, FB_AUTO);
        return FB_OK;
    }
    if (k->flags & FB_KEY_ALL && !strcmp(text, "all")) {
        store(o, k, FB_SLOTS_ALL);
        return FB_OK;
    }
    if (k->flags & FB_KEY_AUTO_MOST && !strcmp(text, "auto")) {
        *(uint64_t *)at = FB_SIZE_MOST;
        return FB_OK;
    }
    switch (k->kind) {
    case FB_KIND_BOOL:
        return fb_parse_bool(text, at) ? FB_OK : FB_CONFIG;
    case FB_KIND_REAL:
        if (!fb_parse_real(text, &real) || !in_range(k, real))
            return FB_CONFIG;
        *(double *)at = real;
        return FB_OK;
    case FB_KIND_SIZE:
        return fb_parse_size(text, at) ? FB_OK : FB_CONFIG;
    case FB_KIND_CHOICE:
        for (const fb_choice *c = k->choice; c->name; c++)
            if (!strcmp(text, c->name)) {
                store(o, k, c->value);
                return FB_OK;
            }
        return FB_CONFIG;
    case FB_KIND_TEXT:
        return set_text(o, k, text);
    default:
        if (!fb_parse_int(text, &whole) || !in_range(k, (double)whole))
            return FB_CONFIG;
        store(o, k, whole);
        return FB_OK;
    }
}

fb_status fb_key_set_default(fb_options *o, const fb_key *k)
{
    if (k->fallback) {
        fb_status st = fb_key_set(o, k, k->fallback);
        assert(st != FB_CONFIG);
        return st;
    }
    void *at = fb_key_field(o, k);
    switch (k->kind) {
    case FB_KIND_TEXT:
        free(*(char **)at);
        *(char **)at = NULL;
        break;
    case FB_KIND_REAL:
        *(double *)at = -1;
        break;
    case FB_KIND_BOOL:
        *(bool *)at = false;
        break;
    default:
        store(o, k, 0);
    }
    return FB_OK;
}

const char *fb_key_kind_str(const fb_key *k)
{
    static const char *const name[FB_KIND_COUNT] = { "bool", "integer", "integer", "integer",
                                                     "number", "size", "choice", "text" };
    return k->flags & FB_KEY_LIST ? "list" : name[k->kind];
}

json_t *fb_key_json(const fb_options *o, const fb_key *k)
{
    const void *at = fb_key_field(o, k);
    if (k->schedules && !(k->schedules >> o->lr_scheduler_type & 1))
        return json_null();
    switch (k->kind) {
    case FB_KIND_BOOL:
        return json_boolean(*(const bool *)at);
    case FB_KIND_U32:
    case FB_KIND_U64:
    case FB_KIND_SIZE: {
        uint64_t value = k->kind == FB_KIND_U32 ? *(const uint32_t *)at : *(const uint64_t *)at;
        if (k->flags & FB_KEY_AUTO && value == FB_AUTO)
            return json_string("auto");
        if (k->flags & FB_KEY_AUTO_MOST && value == FB_SIZE_MOST)
            return json_string("auto");
        if (k->flags & FB_KEY_ALL && value == FB_SLOTS_ALL)
            return json_string("all");
        return !k->fallback && value == 0 ? json_null() : json_integer((json_int_t)value);
    }
    case FB_KIND_I64:
        return json_integer(*(const int64_t *)at);
    case FB_KIND_REAL:
        return !k->fallback && *(const double *)at < 0 ? json_null() : json_real(*(const double *)at);
    case FB_KIND_CHOICE: {
        const fb_choice *c = k->choice;
        while (c->name && c->value != *(const int *)at)
            c++;
        assert(c->name);
        return json_string(c->name);
    }
    default:
        return *(char *const *)at ? json_string(*(char *const *)at) : json_null();
    }
}

