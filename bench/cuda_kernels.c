/* cuda_kernels.c - how much of the memory's bandwidth the cuda back end's own kernels reach, at the shapes of Qwen2.5-7B
 * (C 3584, F 18944, H 28, G 4, D 128, V 152064) with T = 16384 tokens, in bfloat16.
 *
 *     bench/cuda_kernels [NAME]
 *
 * Each operand counts once, read or written; what a kernel reads twice is its own fault.  Operands are larger than the
 * L2 cache, but for the loss's rows.  The median of several rounds of back-to-back launches. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/kernels.h"

enum { T = 16384, C = 3584, F = 18944, H = 28, G = 4, D = 128, V = 152064, HEAD_T = 1024, QKV = (H + 2 * G) * D, GRAD = 1 << 28,
       ROUNDS = 7, LAUNCHES = 10, ID_COUNT = 4096 };

static fb_device *d;
static fb_error err;
static const char *only;

static void must(fb_status st)
{
    if (st == FB_OK)
        return;
    fprintf(stderr, "cuda_kernels: %s\n", err.msg);
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *memory(uint64_t size)
{
    void *mem;
    must(d->ops->alloc(d, size, &mem, &err));
    must(d->ops->fill_zero(d, FB_STREAM_COMPUTE, mem, size, &err));
    return mem;
}

static void *filled(const void *from, uint64_t size)
{
    void *mem = memory(size);
    must(d->ops->upload(d, FB_STREAM_COMPUTE, mem, from, size, &err));
    must(d->ops->sync(d, FB_STREAM_COMPUTE, &err));
    return mem;
}

/* Uniform in [-1, 1), the same megabyte again and again. */
static void *numbers(fb_dtype type, uint64_t n)
{
    enum { PIECE = 1 << 20 };
    static unsigned char piece[PIECE];
    static uint64_t state = 1;
    uint64_t size = n * fb_dtype_size(type);
    unsigned char *mem = memory(size);
    for (uint64_t i = 0; i < PIECE / fb_dtype_size(type); i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        float f = (float)(int32_t)(state >> 32) * 0x1p-31f;
        if (type == FB_F32)
            ((float *)(void *)piece)[i] = f;
        else
            ((uint16_t *)(void *)piece)[i] = fb_f32_bf16(f);
    }
    for (uint64_t at = 0; at < size; at += PIECE)
        must(d->ops->upload(d, FB_STREAM_COMPUTE, mem + at, piece, size - at < PIECE ? size - at : PIECE, &err));
    must(d->ops->sync(d, FB_STREAM_COMPUTE, &err));
    return mem;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(const char *name, double bytes, fb_status (*run)(const void *args), const void *args)
{
    double seconds[ROUNDS];
    if (only && !strstr(name, only))
        return;
    for (int round = -1; round < ROUNDS; round++) { /* the first warms up */
        double start = now();
        for (int i = 0; i < LAUNCHES; i++)
            must(run(args));
        must(d->ops->sync(d, FB_STREAM_COMPUTE, &err));
        if (round >= 0)
            seconds[round] = (now() - start) / LAUNCHES;
    }
    qsort(seconds, ROUNDS, sizeof *seconds, by_value);
    double median = seconds[ROUNDS / 2];
    printf("%-14s %9.1f us  %7.0f GB/s  (%.0f to %.0f)\n", name, median * 1e6, bytes / median * 1e-9, bytes / seconds[ROUNDS - 1] * 1e-9,
           bytes / seconds[0] * 1e-9);
    fflush(stdout);
}

/* A wrapper a kernel, since a function pointer may not be called through another type. */
#define DEFINE_RUN(name) static fb_status run_##name(const void *args) { return d->kernels->name(d, args, &err); }
DEFINE_RUN(rms_norm) DEFINE_RUN(rms_norm_bwd) DEFINE_RUN(rope_qk) DEFINE_RUN(rope_qk_bwd) DEFINE_RUN(swiglu) DEFINE_RUN(swiglu_bwd)
DEFINE_RUN(gather_rows) DEFINE_RUN(scatter_rows) DEFINE_RUN(embed_grad) DEFINE_RUN(cross_entropy) DEFINE_RUN(bias_grad) DEFINE_RUN(grad_out)
#define MEASURE(name, bytes, ...) measure(#name, bytes, run_##name, &(fb_##name){ __VA_ARGS__ })

int main(int argc, char **argv)
{
    static uint32_t position[T], backwards[T], id[ID_COUNT], start[ID_COUNT + 1], target[HEAD_T];
    only = argc > 1 ? argv[1] : NULL;
    must(fb_device_open(&d, &(fb_device_options){ .backend = "cuda" }, &err));
    fb_device_info info;
    d->ops->info(d, &info);
    printf("%s\n", info.name);
    for (uint32_t i = 0; i < T; i++) {
        position[i] = i % 4096;
        backwards[i] = T - 1 - i;
    }
    for (uint32_t i = 0; i <= ID_COUNT; i++) {
        start[i] = i * (T / ID_COUNT);
        if (i < ID_COUNT)
            id[i] = 3 * i;
    }
    for (uint32_t i = 0; i < HEAD_T; i++)
        target[i] = 7 * i;

    const fb_dtype act = FB_BF16;
    const double tc = (double)T * C, tf = (double)T * F, tq = (double)T * QKV;
    void *x = numbers(act, (uint64_t)T * C), *y = numbers(act, (uint64_t)T * C), *z = memory((uint64_t)T * C * 2);
    void *w = numbers(act, C), *gu = numbers(act, (uint64_t)T * 2 * F), *dgu = memory((uint64_t)T * 2 * F * 2);
    void *f = numbers(act, (uint64_t)T * F), *qkv = numbers(act, (uint64_t)T * QKV), *dqkv = memory((uint64_t)T * QKV * 2);
    float *small = numbers(FB_F32, T + C), *sums = memory(64 * C), *angles = numbers(FB_F32, 4096 * D / 2);
    uint32_t *at = filled(position, sizeof position), *order = filled(backwards, sizeof backwards), *ids = filled(id, sizeof id), *starts = filled(start, sizeof start);
    uint32_t *targets = filled(target, sizeof target);
    double *sq = memory(256);

    MEASURE(rms_norm, 4 * tc, .act = act, .t = T, .c = C, .eps = 1e-6f, .x = x, .w = w, .y = z, .rstd = small);
    MEASURE(rms_norm_bwd, 8 * tc, .act = act, .t = T, .c = C, .x = x, .w = w, .dy = y, .rstd = small, .add = z, .dx = z, .dw = sums,
            .accumulate = true);
    fb_rope_qk rope = { .act = act, .t = T, .n_head = H, .n_kv_head = G, .head_dim = D, .eps = 1e-6f, .qkv = qkv, .position = at,
                        .cos = angles, .sin = angles, .q = x, .k = y };
    const double rope_bytes = 4.0 * T * (H + G) * D;
    measure("rope_qk", rope_bytes, run_rope_qk, &rope);
    measure("rope_qk_bwd", rope_bytes, run_rope_qk_bwd, &(fb_rope_qk_bwd){ .fwd = rope, .dq = x, .dk = y, .dqkv = dqkv });
    rope.q_norm = rope.k_norm = w;
    measure("rope_qk norm", rope_bytes, run_rope_qk, &rope);
    measure("rope_qk_bwd norm", 1.5 * rope_bytes, run_rope_qk_bwd, &(fb_rope_qk_bwd){ .fwd = rope, .dq = x, .dk = y, .dqkv = dqkv,
            .dq_norm = sums, .dk_norm = sums + D, .accumulate = true });
    MEASURE(swiglu, 6 * tf, .act = act, .t = T, .f = F, .gu = gu, .y = f);
    MEASURE(swiglu_bwd, 10 * tf, .act = act, .t = T, .f = F, .gu = gu, .dy = f, .dgu = dgu);
    MEASURE(bias_grad, 2 * tq, .act = act, .m = T, .n = QKV, .dy = qkv, .dy_ld = QKV, .db = sums, .accumulate = true);
    MEASURE(gather_rows, 4 * tc, .act = act, .n = T, .c = C, .x = x, .index = order, .y = z);
    MEASURE(scatter_rows, 4 * 4096.0 * C + 2 * tc, .act = act, .n = 4096, .t = T, .c = C, .x = x, .index = order, .y = z);
    float *acc = numbers(FB_F32, GRAD), *logits = acc;
    void *out = memory((uint64_t)GRAD * 2);
    MEASURE(embed_grad, 2 * tc + 8.0 * ID_COUNT * C, .act = act, .c = C, .n_unique = ID_COUNT, .dx = x, .id = ids, .start = starts,
            .order = order, .d_table = acc);
    MEASURE(grad_out, 6.0 * GRAD, .out_dtype = act, .n = GRAD, .acc = acc, .out = out, .sq = sq);
    MEASURE(cross_entropy, 6.0 * HEAD_T * V, .act = act, .n = HEAD_T, .v = V, .logits = logits, .target = targets, .grad_scale = 1e-4f,
            .d_logits = out, .loss_sum = sq);
    d->ops->close(d);
    return 0;
}
