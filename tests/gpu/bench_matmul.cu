/* bench_matmul.cu - what choosing an algorithm by measurement gains over cuBLASLt's first proposal, for the products of
 * Qwen2.5-7B: of a layer by 4096, 8192 and 16384 tokens, of the head by 2048 rows.
 *
 *   gpu_bench_matmul [PART]    only cases whose name contains PART
 *
 * One line a case: TFLOP/s of the first proposal, of the fastest and of the one that a run would take.  A run's choice comes from
 * one measurement (three runs of each proposal, in rounds); all rates come from later ones, so that luck in the choice is no
 * gain.  The fastest is chosen and rated by the same figures: an upper bound.  The last lines weigh gains by time.  Clocks and
 * power limits decide: warm-up comes first, and the numbers are random, as zeros take less power.
 *
 * What is chosen may differ from start to start, and with it the last bits of a run without full_determinism.
 *
 * Includes what it measures, so that the proposals and their trials are those of a run. */
#include "device/cuda/matmul.cu"

#include <stdio.h>
#include <time.h>
#include <vector>

extern "C" {
#include "device/plugin.h"
extern const fb_plugin fb_plugin_cuda;
}

static const int MEASUREMENTS = 5;
static const double WARM_SECONDS = 3;

static struct {
    fb_cuda       *c;
    const char    *only;
    __nv_bfloat16 *numbers; /* every input; enough for the largest */
    void          *result;
    uint64_t       numbers_size;
    double         first, fastest, chosen; /* seconds of all cases */
} t;

static void check(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "bench_matmul: %s: %s\n", what, cudaGetErrorString(cudaGetLastError()));
        exit(1);
    }
}

static void must(fb_status st, const fb_error *err)
{
    if (st != FB_OK) {
        fprintf(stderr, "bench_matmul: %s\n", err->msg);
        exit(1);
    }
}

static double now(void)
{
    struct timespec s;
    clock_gettime(CLOCK_MONOTONIC, &s);
    return (double)s.tv_sec + 1e-9 * (double)s.tv_nsec;
}

/* Uniform in [-1, 1): SplitMix64 of the index. */
__global__ void random_kernel(__nv_bfloat16 *to, uint64_t n)
{
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x) {
        uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        to[i] = __float2bfloat16_rn((float)(z >> 40) * 0x1p-23f - 1.0f);
    }
}

/* The next operand: each lies where no other of the case does. */
static const __nv_bfloat16 *input(uint64_t *used, uint64_t n)
{
    const __nv_bfloat16 *p = t.numbers + *used;
    *used += (n + 127) / 128 * 128;
    check(*used * sizeof *p <= t.numbers_size, "too little room for a case");
    return p;
}

typedef struct algorithm {
    bool                 known;
    cublasLtMatmulAlgo_t algo;
} algorithm;

/* Where algo is among the proposals; it is made the last one where it is not. */
static int place_of(proposal *proposals, int *n, const cublasLtMatmulAlgo_t *algo)
{
    for (int i = 0; i < *n; i++)
        if (memcmp(&proposals[i].algo, algo, sizeof *algo) == 0)
            return i;
    *n = *n < PROPOSAL_MAX ? *n + 1 : PROPOSAL_MAX;
    proposals[*n - 1] = {};
    proposals[*n - 1].algo = *algo;
    return *n - 1;
}

/* Of a sum in place, which a run does not measure, chosen is what it takes over, if that is known.  Returns what a run takes. */
static algorithm measure(const char *name, facts f, operands o, algorithm inherited)
{
    static plan p;
    fb_cuda *c = t.c;
    fb_error err = {};
    proposal proposals[PROPOSAL_MAX];
    int n, chosen = 0, fastest = 0;
    if (t.only && !strstr(name, t.only))
        return {};
    facts_complete(&f, &o);
    must(plan_describe(c, &p, &f, o.bias, name, &err), &err);
    must(proposals_get(c, &p, proposals, PROPOSAL_MAX, &n, name, &err), &err);

    float ms[PROPOSAL_MAX];
    bool in_place = sums_in_place(&f, &o);
    if (in_place && inherited.known && plan_takes(c, &p, &inherited.algo))
        chosen = place_of(proposals, &n, &inherited.algo);
    must(proposals_time(c, &p, &o, proposals, n, ms, name, &err), &err);
    if (!in_place)
        chosen = choose(ms, n);
    std::vector<float> samples[PROPOSAL_MAX];
    for (int i = 0; i < MEASUREMENTS; i++) {
        must(proposals_time(c, &p, &o, proposals, n, ms, name, &err), &err);
        for (int j = 0; j < n; j++)
            samples[j].push_back(ms[j]);
    }
    double seconds[PROPOSAL_MAX] = {}, flops = 2.0 * f.m * f.n * f.k;
    for (int j = 0; j < n; j++) {
        std::sort(samples[j].begin(), samples[j].end());
        seconds[j] = samples[j][MEASUREMENTS / 2] * 1e-3;
        if (seconds[j] < seconds[fastest])
            fastest = j;
    }
    printf("%-30s first %4.0f, fastest %4.0f (no. %d of %d, %+.1f %%), chosen %4.0f (no. %d, %+.1f %%) TFLOP/s\n", name,
           flops / seconds[0] * 1e-12, flops / seconds[fastest] * 1e-12, fastest, n, 100 * (seconds[0] / seconds[fastest] - 1),
           flops / seconds[chosen] * 1e-12, chosen, 100 * (seconds[0] / seconds[chosen] - 1));
    fflush(stdout);
    t.first += seconds[0];
    t.fastest += seconds[fastest];
    t.chosen += seconds[chosen];
    return { true, proposals[chosen].algo };
}

enum { WITH_BIAS = 1, WITH_ADD = 2, IS_HEAD = 4 };

/* y[rows,n] = x[rows,k] w[n,k]^T and its backward. */
static void linear(const char *layer, uint32_t rows, uint32_t n, uint32_t k, int with)
{
    char name[64];
    uint64_t used = 0, y_size = (uint64_t)rows * n;
    const __nv_bfloat16 *x = input(&used, (uint64_t)rows * k), *w = input(&used, (uint64_t)n * k), *dy = input(&used, y_size);
    const __nv_bfloat16 *bias = with & WITH_BIAS ? input(&used, n) : NULL, *add = with & WITH_ADD ? input(&used, y_size) : NULL;
    fb_matmul_nt nt = { FB_BF16, with & IS_HEAD ? FB_F32 : FB_BF16, rows, n, k, x, k, w, k, bias, add, n, t.result, n };
    fb_matmul_nn nn = { FB_BF16, rows, n, k, dy, n, w, k, t.result, k };
    fb_matmul_tn set = { FB_BF16, rows, n, k, dy, n, x, k, (float *)t.result, false }, sum = set;
    sum.accumulate = true;

    snprintf(name, sizeof name, "%s %u nt%s%s", layer, rows, bias ? " + bias" : "", add ? " + add" : "");
    measure(name, nt_facts(&nt), nt_operands(&nt), {});
    snprintf(name, sizeof name, "%s %u nn", layer, rows);
    measure(name, nn_facts(&nn), nn_operands(&nn), {});
    snprintf(name, sizeof name, "%s %u tn", layer, rows);
    algorithm taken = measure(name, tn_facts(&set), tn_operands(&set), {});
    check(cudaMemsetAsync(t.result, 0, (uint64_t)n * k * sizeof(float), fb_cuda_compute(t.c)) == cudaSuccess, "zeros to add to");
    snprintf(name, sizeof name, "%s %u tn accumulated", layer, rows);
    /* The engine always adds to the head's gradient: there is nothing to take over. */
    measure(name, tn_facts(&sum), tn_operands(&sum), with & IS_HEAD ? algorithm{} : taken);
}

static void warm_up(void)
{
    const uint32_t side = 8192;
    uint64_t used = 0, n = (uint64_t)side * side;
    const __nv_bfloat16 *x = input(&used, n), *w = input(&used, n);
    fb_matmul_nt a = { FB_BF16, FB_BF16, side, side, side, x, side, w, side, NULL, NULL, 0, t.result, side };
    fb_error err = {};
    for (double end = now() + WARM_SECONDS; now() < end;) {
        for (int i = 0; i < 32; i++)
            must(fb_cuda_matmul_nt(&t.c->device, &a, &err), &err);
        check(cudaStreamSynchronize(fb_cuda_compute(t.c)) == cudaSuccess, "warm-up");
    }
}

static size_t memory_left(void)
{
    size_t left = 0, total;
    check(cudaMemGetInfo(&left, &total) == cudaSuccess, "memory left");
    return left;
}

int main(int argc, char **argv)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        printf("skipped: no GPU\n");
        return 77;
    }
    t.only = argc > 1 ? argv[1] : NULL;
    fb_device *d = NULL;
    fb_error err = {};
    fb_device_options options = {};
    options.backend = "cuda";
    double start = now();
    must(fb_plugin_cuda.open(&d, &options, &err), &err);
    printf("opened in %.2f s\n", now() - start);
    t.c = (fb_cuda *)d;
    t.numbers_size = UINT64_C(3) << 30; /* gate up at 16384: 1.6 GB; the head: 1.8 GB */
    check(cudaMalloc(&t.numbers, t.numbers_size) == cudaSuccess, "memory for the operands");
    check(cudaMalloc(&t.result, UINT64_C(152064) * 3584 * sizeof(float)) == cudaSuccess, "memory for the results");
    random_kernel<<<4096, 256>>>(t.numbers, t.numbers_size / sizeof *t.numbers);
    check(cudaDeviceSynchronize() == cudaSuccess, "random numbers");
    size_t left = memory_left();

    warm_up();
    for (uint32_t tokens = 4096; tokens <= 16384; tokens *= 2) {
        linear("qkv", tokens, 4608, 3584, WITH_BIAS);
        linear("o", tokens, 3584, 3584, WITH_ADD);
        linear("gate up", tokens, 37888, 3584, 0);
        linear("down", tokens, 3584, 18944, WITH_ADD);
    }
    linear("head", 2048, 152064, 3584, IS_HEAD);
    printf("%.1f s; the proposals' code took %.1f MiB of device memory\n", now() - start,
           ((double)left - (double)memory_left()) / 0x1p20);
    if (t.first > 0)
        printf("weighed by time: a run's choice gains %+.2f %% over the first proposals; the fastest %+.2f %%\n",
               100 * (t.first / t.chosen - 1), 100 * (t.first / t.fastest - 1));
    d->ops->close(d);
    cudaFree(t.numbers);
    cudaFree(t.result);
    return 0;
}
