/* bench/attention.c - how fast are the cpu back end's attention kernels?
 *
 *     attention [threads [heads kv_heads head_dim]]      default: 2 threads, the shape of SmolLM2-135M (9, 3, 64)
 *
 * 1024 tokens as four documents and as one; float32; v lies inside packed qkv as it does in training.  Prints the
 * least and the median time of 30 calls, and the rate by the causal half of the score matrix: 2 products of it forward,
 * 5 backward. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "device/cpu/cpu.h"

enum { TOKENS = 1024, CALLS = 30 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static float *floats(uint64_t n)
{
    float *x = aligned_alloc(64, (n * sizeof *x + 63) / 64 * 64);
    if (!x) {
        fprintf(stderr, "attention: no memory for %llu floats\n", (unsigned long long)n);
        exit(1);
    }
    uint32_t state = 12345;
    for (uint64_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(state >> 8) * 0x1p-23f - 1.0f;
    }
    return x;
}

static void measure(fb_cpu_scratch *s, uint32_t n_head, uint32_t n_kv_head, uint32_t head_dim, uint32_t n_document)
{
    uint64_t q_row = (uint64_t)n_head * head_dim, kv_row = (uint64_t)n_kv_head * head_dim;
    uint64_t qkv_row = q_row + 2 * kv_row;
    fb_span span[TOKENS];
    for (uint32_t i = 0, len = TOKENS / n_document; i < n_document; i++)
        span[i] = (fb_span){ i * len, len, i * len, len };
    float *qkv = floats(TOKENS * qkv_row), *d_qkv = floats(TOKENS * qkv_row);
    float *q = floats(TOKENS * q_row), *k = floats(TOKENS * kv_row), *o = floats(TOKENS * q_row);
    float *d_o = floats(TOKENS * q_row), *lse = floats((uint64_t)TOKENS * n_head);
    float *scratch = floats(fb_cpu_attention_scratch(TOKENS, n_head, head_dim) / sizeof(float));
    fb_attention_bwd b = {
        .fwd = { .act = FB_F32, .t = TOKENS, .n_head = n_head, .n_kv_head = n_kv_head, .head_dim = head_dim,
                 .scale = 0.125f, .span = span, .n_span = n_document,
                 .q_len_max = TOKENS / n_document, .k_len_max = TOKENS / n_document, .q = q, .q_ld = q_row,
                 .k = k, .k_ld = kv_row, .v = qkv + q_row + kv_row, .v_ld = qkv_row, .o = o, .o_ld = q_row,
                 .lse = lse },
        .d_o = d_o, .do_ld = q_row, .dq = d_qkv, .dq_ld = qkv_row, .dk = d_qkv + q_row, .dk_ld = qkv_row,
        .dv = d_qkv + q_row + kv_row, .dv_ld = qkv_row, .scratch = scratch,
    };

    double forward[CALLS], backward[CALLS], both[CALLS];
    for (int i = -2; i < CALLS; i++) {
        double start = now();
        fb_cpu_attention(s, &b.fwd);
        double turn = now();
        fb_cpu_attention_bwd(s, &b);
        double end = now();
        if (i >= 0) {
            forward[i] = turn - start;
            backward[i] = end - turn;
            both[i] = end - start;
        }
    }
    qsort(forward, CALLS, sizeof *forward, by_value);
    qsort(backward, CALLS, sizeof *backward, by_value);
    qsort(both, CALLS, sizeof *both, by_value);
    double product = (double)TOKENS * TOKENS / n_document * n_head * head_dim; /* 2 flops, half of them masked */
    printf("%u x %4u  forward %6.2f (%6.2f) ms %4.0f GFLOP/s   backward %6.2f (%6.2f) ms %4.0f GFLOP/s   "
           "sum %6.2f (%6.2f) ms\n",
           n_document, TOKENS / n_document, 1e3 * forward[0], 1e3 * forward[CALLS / 2], 2e-9 * product / forward[0],
           1e3 * backward[0], 1e3 * backward[CALLS / 2], 5e-9 * product / backward[0],
           1e3 * both[0], 1e3 * both[CALLS / 2]);
    float *const all[] = { qkv, d_qkv, q, k, o, d_o, lse, scratch };
    for (size_t i = 0; i < FB_COUNT(all); i++)
        free(all[i]);
}

int main(int argc, char **argv)
{
    uint32_t arg[] = { 2, 9, 3, 64 };
    for (int i = 1; i < argc && i <= 4; i++)
        arg[i - 1] = (uint32_t)strtoul(argv[i], NULL, 10);
    if (arg[2] == 0 || arg[1] % arg[2] != 0 || arg[3] == 0 || arg[3] > 256 || arg[1] > 1024) {
        fprintf(stderr, "attention: heads must be a multiple of kv_heads (1024 at most), head_dim 1 to 256\n");
        return 2;
    }
    fb_error err;
    fb_cpu_scratch s = { 0 };
    if (fb_team_new(&s.team, arg[0], "bench", &err)) {
        fprintf(stderr, "attention: %s\n", err.msg);
        return 1;
    }
    s.base = (unsigned char *)floats((uint64_t)arg[0] * FB_CPU_SCRATCH_SIZE / sizeof(float));
    fb_cpu_blas_init();
    printf("%u threads, %u heads, %u key-value heads, head_dim %u; least (median) of %d\n",
           arg[0], arg[1], arg[2], arg[3], CALLS);
    measure(&s, arg[1], arg[2], arg[3], 4);
    measure(&s, arg[1], arg[2], arg[3], 1);
    fb_team_free(s.team);
    free(s.base);
    return 0;
}
