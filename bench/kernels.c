/* kernels.c - how fast each CPU kernel is, at the shapes of SmolLM2-135M (C 576, F 1536, H 9, G 3, D 64, V 49152) with
 * T = 1024 tokens and the head's 256 tokens at a time.
 *
 *     bench/kernels [threads [f32|bf16 [name]]]
 *
 * Prints the best of several rounds, since other work on the machine only ever adds time.  GB/s count each operand
 * once, read or written. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/cpu/cpu.h"

enum { T = 1024, C = 576, F = 1536, H = 9, G = 3, D = 64, V = 49152, HEAD_T = 256, QKV = (H + 2 * G) * D, ROUNDS = 7 };

static const double round_seconds = 0.04;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct bench {
    fb_cpu_scratch scratch;
    const char *only; /* part of a name; NULL: all */
} bench;

typedef void (*kernel)(fb_cpu_scratch *s, const void *args);

static void measure(bench *b, const char *name, const char *shape, double work, const char *unit, kernel run, const void *args)
{
    if (b->only && !strstr(name, b->only))
        return;
    double best = 1e30;
    run(&b->scratch, args);
    for (int round = 0; round < ROUNDS; round++) {
        double start = now(), t;
        uint32_t n = 0;
        do {
            run(&b->scratch, args);
            n++;
        } while ((t = now() - start) < round_seconds);
        best = t / n < best ? t / n : best;
    }
    printf("%-14s %-18s %9.3f ms  %7.1f %s\n", name, shape, best * 1e3, work / best * 1e-9, unit);
    fflush(stdout);
}

/* A wrapper a kernel, since a function pointer may not be called through another type. */
#define DEFINE_RUN(name) static void run_##name(fb_cpu_scratch *s, const void *args) { fb_cpu_##name(s, args); }
FB_KERNEL_MAP(DEFINE_RUN)
#define MEASURE(name, shape, work, unit, ...) measure(b, #name, shape, work, unit, run_##name, &(fb_##name){ __VA_ARGS__ })

static void *memory(uint64_t size)
{
    void *p = aligned_alloc(256, (size + 255) / 256 * 256);
    if (!p) {
        fprintf(stderr, "no memory for %" PRIu64 " bytes\n", size);
        exit(1);
    }
    memset(p, 0, size);
    return p;
}

/* Uniform in [-1, 1). */
static void *numbers(fb_dtype t, uint64_t n)
{
    static uint64_t state = 1;
    void *p = memory(n * fb_dtype_size(t));
    for (uint64_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        float f = (float)(int32_t)(state >> 32) * 0x1p-31f;
        if (t == FB_F32)
            ((float *)p)[i] = f;
        else
            ((uint16_t *)p)[i] = fb_f32_bf16(f);
    }
    return p;
}

static void bench_linear(bench *b, fb_dtype act, const char *shape, uint32_t m, uint32_t n, uint32_t k, fb_dtype y_dtype, bool residual)
{
    double flop = 2.0 * m * n * k;
    void *x = numbers(act, (uint64_t)m * k), *w = numbers(act, (uint64_t)n * k), *dy = numbers(act, (uint64_t)m * n);
    void *add = numbers(act, (uint64_t)m * n), *y = memory((uint64_t)m * n * 4), *dx = memory((uint64_t)m * k * 4);
    float *dw = memory((uint64_t)n * k * 4);
    MEASURE(matmul_nt, shape, flop, "GFLOP/s", .act = act, .y_dtype = y_dtype, .m = m, .n = n, .k = k, .x = x, .x_ld = k,
            .w = w, .w_ld = k, .add = residual ? add : NULL, .add_ld = n, .y = y, .y_ld = n);
    MEASURE(matmul_nn, shape, flop, "GFLOP/s", .act = act, .m = m, .n = n, .k = k, .dy = dy, .dy_ld = n, .w = w,
            .w_ld = k, .dx = dx, .dx_ld = k);
    MEASURE(matmul_tn, shape, flop, "GFLOP/s", .act = act, .m = m, .n = n, .k = k, .dy = dy, .dy_ld = n, .x = x,
            .x_ld = k, .dw = dw, .accumulate = true);
    free(x), free(w), free(dy), free(add), free(y), free(dx), free(dw);
}

static void bench_rows(bench *b, fb_dtype act)
{
    double e = (double)fb_dtype_size(act);
    void *x = numbers(act, (uint64_t)T * C), *w = numbers(act, C), *y = memory((uint64_t)T * C * 4), *dy = numbers(act, (uint64_t)T * QKV);
    void *gu = numbers(act, (uint64_t)T * 2 * F), *dgu = memory((uint64_t)T * 2 * F * 4), *df = numbers(act, (uint64_t)T * F);
    float *rstd = memory(T * 4), *dw = memory(QKV * 4), *table = memory((uint64_t)V * C * 4);
    uint32_t *id = memory(T * 4), *start = memory((T + 1) * 4), *order = memory(T * 4);
    for (uint32_t i = 0; i < T; i++)
        id[i] = i * 47 % V, start[i + 1] = i + 1, order[i] = i * 389 % T;

    MEASURE(bias_grad, "960", e * T * QKV, "GB/s", .act = act, .m = T, .n = QKV, .dy = dy, .dy_ld = QKV, .db = dw);
    MEASURE(rms_norm, "", e * 2 * T * C, "GB/s", .act = act, .t = T, .c = C, .eps = 1e-5f, .x = x, .w = w, .y = y, .rstd = rstd);
    MEASURE(rms_norm_bwd, "with add", e * 4 * T * C, "GB/s", .act = act, .t = T, .c = C, .x = x, .w = w, .dy = dy,
            .rstd = rstd, .add = gu, .dx = y, .dw = dw, .accumulate = true);
    MEASURE(swiglu, "", e * 3 * T * F, "GB/s", .act = act, .t = T, .f = F, .gu = gu, .y = dgu);
    MEASURE(swiglu_bwd, "", e * 5 * T * F, "GB/s", .act = act, .t = T, .f = F, .gu = gu, .dy = df, .dgu = dgu);
    MEASURE(gather_rows, "", e * 2 * T * C, "GB/s", .act = act, .n = T, .c = C, .x = x, .index = order, .y = y);
    MEASURE(scatter_rows, "", e * 3 * T * C, "GB/s", .act = act, .n = T, .t = T, .c = C, .x = x, .index = order, .y = y);
    MEASURE(embed_grad, "", (e + 8) * T * C, "GB/s", .act = act, .c = C, .n_unique = T, .dx = x, .id = id, .start = start,
            .order = order, .d_table = table);
    free(x), free(w), free(y), free(dy), free(gu), free(dgu), free(df), free(rstd), free(dw), free(table);
    free(id), free(start), free(order);
}

static void bench_loss(bench *b, fb_dtype act)
{
    double n = (double)HEAD_T * V;
    float *logits = numbers(FB_F32, (uint64_t)HEAD_T * V), *acc = numbers(FB_F32, (uint64_t)F * C * 8);
    void *d = memory((uint64_t)HEAD_T * V * 4);
    uint32_t *target = memory(HEAD_T * 4);
    double *sum = memory(sizeof *sum);
    MEASURE(cross_entropy, "loss only", n * 4, "GB/s", .act = act, .n = HEAD_T, .v = V, .logits = logits, .target = target,
            .grad_scale = 1.0f, .loss_sum = sum);
    MEASURE(cross_entropy, "256 rows", n * (4 + (double)fb_dtype_size(act)), "GB/s", .act = act, .n = HEAD_T, .v = V,
            .logits = logits, .target = target, .grad_scale = 1.0f, .d_logits = d, .loss_sum = sum);
    MEASURE(grad_out, "7 M", (double)F * C * 8 * (4 + (double)fb_dtype_size(act)), "GB/s", .out_dtype = act, .n = (uint64_t)F * C * 8,
            .acc = acc, .out = act == FB_F32 ? (void *)acc : d, .sq = sum);
    uint64_t count = (uint64_t)F * C * 8;
    void *w = numbers(act, count), *g = numbers(act, count), *low = memory(count * sizeof(int16_t));
    void *m = memory(count * sizeof(float)), *v = memory(count * sizeof(float));
    const fb_adamw adamw = { .lr = 1e-5, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .clip = 1, .step = 1 };
    MEASURE(update, "7 M", (double)count * (act == FB_F32 ? 28 : 26), "GB/s", .act = act, .g_dtype = act, .n = count, .w = w, .low = low, .g = g,
            .m = m, .v = v, .adamw = fb_adamw_scalars_of(&adamw, true));
    free(w), free(g), free(low), free(m), free(v);
    free(logits), free(acc), free(d), free(target), free(sum);
}

static void bench_attention(bench *b, fb_dtype act)
{
    void *qkv = numbers(act, (uint64_t)T * QKV), *q = numbers(act, (uint64_t)T * H * D), *k = numbers(act, (uint64_t)T * G * D);
    void *o = memory((uint64_t)T * H * D * 4), *d_o = numbers(act, (uint64_t)T * H * D), *dqkv = memory((uint64_t)T * QKV * 4);
    void *dq = memory((uint64_t)T * H * D * 4), *dk = memory((uint64_t)T * G * D * 4), *dv = memory((uint64_t)T * G * D * 4);
    float *lse = memory((uint64_t)H * T * 4), *cos = numbers(FB_F32, T * D / 2), *sin = numbers(FB_F32, T * D / 2);
    void *scratch = memory(fb_cpu_attention_scratch(T, H, D));
    uint32_t *position = memory(T * 4);
    for (uint32_t i = 0; i < T; i++)
        position[i] = i;
    fb_span *span = memory(sizeof *span);
    *span = (fb_span){ 0, T, 0, T };

    fb_rope_qk rope = { .act = act, .t = T, .n_head = H, .n_kv_head = G, .head_dim = D, .qkv = qkv, .position = position,
                        .cos = cos, .sin = sin, .q = o, .k = dk };
    double e = (double)fb_dtype_size(act), moved = e * 2 * T * (H + G) * D;
    measure(b, "rope_qk", "", moved, "GB/s", run_rope_qk, &rope);
    MEASURE(rope_qk_bwd, "", moved, "GB/s", .fwd = rope, .dq = q, .dk = k, .dqkv = dqkv);

    fb_attention fwd = { .act = act, .t = T, .n_head = H, .n_kv_head = G, .head_dim = D, .scale = 0.125f, .span = span, .n_span = 1,
                         .q_len_max = T, .k_len_max = T, .q = q, .q_ld = H * D, .k = k, .k_ld = G * D,
                         .v = (char *)qkv + (uint64_t)(H + G) * D * fb_dtype_size(act), .v_ld = QKV, .o = o, .o_ld = H * D, .lse = lse };
    double flop = 4.0 * H * D * T * (T + 1) / 2; /* two products over the causal half */
    measure(b, "attention", "one document", flop, "GFLOP/s", run_attention, &fwd);
    fb_cpu_attention(&b->scratch, &fwd);
    MEASURE(attention_bwd, "one document", 2.5 * flop, "GFLOP/s", .fwd = fwd, .d_o = d_o, .do_ld = H * D, .dq = dq, .dq_ld = H * D,
            .dk = dk, .dk_ld = G * D, .dv = dv, .dv_ld = G * D, .scratch = scratch);
    free(qkv), free(q), free(k), free(o), free(d_o), free(dqkv), free(dq), free(dk), free(dv), free(lse), free(cos), free(sin);
    free(scratch), free(position), free(span);
}

int main(int argc, char **argv)
{
    int n_thread = argc > 1 ? atoi(argv[1]) : (int)fb_core_count();
    fb_dtype act = argc > 2 && strcmp(argv[2], "bf16") == 0 ? FB_BF16 : FB_F32;
    fb_error err;
    bench b = { .only = argc > 3 ? argv[3] : NULL };
    if (n_thread < 1 || fb_team_new(&b.scratch.team, (uint32_t)n_thread, "bench", &err)) {
        fprintf(stderr, "%s\n", n_thread < 1 ? "threads: a number from 1" : err.msg);
        return 2;
    }
    b.scratch.base = memory((uint64_t)n_thread * FB_CPU_SCRATCH_SIZE);
    fb_cpu_blas_init();
    printf("%d threads, %s\n", n_thread, fb_dtype_str(act));

    bench_linear(&b, act, "qkv 960x576", T, QKV, C, act, false);
    bench_linear(&b, act, "o 576x576 + add", T, C, H * D, act, true);
    bench_linear(&b, act, "gate,up 3072x576", T, 2 * F, C, act, false);
    bench_linear(&b, act, "down 576x1536+add", T, C, F, act, true);
    bench_linear(&b, act, "head 256 tokens", HEAD_T, V, C, FB_F32, false);
    bench_rows(&b, act);
    bench_loss(&b, act);
    bench_attention(&b, act);

    fb_team_free(b.scratch.team);
    free(b.scratch.base);
    return 0;
}
