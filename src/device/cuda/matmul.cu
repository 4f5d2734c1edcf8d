/* matmul.cu - the three products of a linear layer, by cuBLASLt.
 *
 * cuBLASLt's matrices are column-major, ours row-major, so that it sees each of ours transposed, and computes the
 * transposed result with the operands exchanged:
 *
 *     nt   y = x w^T     y^T  [N,M] = (w^T)^T x^T        A = w, transposed     B = x
 *     nn   dx = dy w     dx^T [K,M] = w^T dy^T           A = w                 B = dy
 *     tn   dw = dy^T x   dw^T [K,N] = x^T (dy^T)^T       A = x                 B = dy, transposed
 *
 * A bias runs along the rows of the transposed result, as the library's epilogue wants it; what is added is its C.
 *
 * Bits: what the heuristic is asked are the shapes, the leading dimensions and the alignment of the pointers, up to the 16
 * bytes that kernels.h promises and beyond which no kernel gains; so where the memory lies changes no bit.  Sums that are split
 * over blocks may only be reduced through the workspace, in float32 and in one order (REDUCTION_SCHEME_COMPUTE_TYPE): the "in
 * place" scheme rounds partial sums to the output's dtype.  An algorithm so repeats its bits.  float32 means float32: no tf32.
 *
 * Which algorithm: with full_determinism the heuristic's first proposal, never a matter of timing.  Without, the fastest of its
 * first ones, measured at the first use of a class of products: shapes that differ in their number of tokens alone, up to the
 * next power of two.  So the choice, and with it the last bits, may differ from start to start; from the first use until the
 * device closes it is one.  Trials run on the operands themselves and write the result many times over.  A sum in place would
 * grow with each: it takes what was chosen for the class that does not add, or without that the first proposal.
 *
 * A plan is everything but the pointers.  Plans are plain values in a fixed table, two to a set; a shape whose set is full
 * takes the older one's place, and asking the heuristic again costs some 50 us of host time.  So a run whose micro-batches
 * differ in their number of tokens neither grows nor fails. */
#include <algorithm>
#include <assert.h>
#include <cublasLt.h>
#include <math.h>
#include <stdlib.h>

#include "device/cuda/cuda.h"

enum { SET_COUNT = 512, WAYS = 2, CHOICE_MAX = 64, PROPOSAL_MAX = 8, ROUNDS = 3, EVENT_COUNT = PROPOSAL_MAX * ROUNDS + 1 };
static const uint32_t ALIGNMENT_MAX = 16;

/* Smaller products are not measured: all of a small model's take less time than their trials.  The side of the largest that
 * opening runs: its trials load the code of the proposals before the memory taken is measured. */
static const uint32_t MEASURED_SIDE = 2048;
/* Trials stop growing there: rates do not change any more, and trials of a very long micro-batch would
 * take longer than its step. */
static const uint32_t TRIAL_TOKENS_MAX = 16384;
/* A chip that has idled runs faster than its power allows for long: it is put to work before the first trial, for so long. */
static const float WARM_MS = 1500;
/* A choice must be worth more than the noise of three runs. */
static const float GAIN_MIN = 0.01f;

/* A product in the library's terms: d[m,n] = op(a) op(b) + bias + c, column-major.  All facts, no padding: the table
 * compares bytes. */
struct facts {
    uint32_t a_trans = 0, b_trans = 0;
    uint32_t type = 0, d_type = 0; /* cudaDataType_t of a, b, bias; of c, d */
    uint32_t m = 0, n = 0, k = 0;
    uint32_t has_bias = 0, has_c = 0;
    uint32_t a_alignment = 0, b_alignment = 0, c_alignment = 0, d_alignment = 0;
    uint32_t pad = 0;
    uint64_t a_ld = 0, b_ld = 0, c_ld = 0, d_ld = 0;
};
static_assert(sizeof(facts) == 14 * sizeof(uint32_t) + 4 * sizeof(uint64_t), "no padding but pad");

typedef struct operands {
    const void *a, *b, *bias, *c;
    void *d;
} operands;

typedef struct plan {
    facts f;
    uint64_t used; /* when it was used last; 0: empty */
    cublasLtMatmulDescOpaque_t   product;
    cublasLtMatrixLayoutOpaque_t a, b, c, d;
    cublasLtMatmulAlgo_t         algo, first; /* first: what the heuristic would take */
} plan;

typedef struct choice { /* what measurement has found for a class of products */
    facts f;            /* the token dimension rounded up */
    uint64_t used;      /* when a plan asked last; 0: empty */
    cublasLtMatmulAlgo_t algo;
} choice;

typedef cublasLtMatmulHeuristicResult_t proposal;

struct fb_cuda_matmul_state {
    cublasLtHandle_t handle;
    uint64_t clock;
    plan table[SET_COUNT][WAYS];
    choice choices[CHOICE_MAX]; /* a new class takes the place of the one that was not asked for longest */
    cudaEvent_t event[EVENT_COUNT]; /* only where there is something to measure */
    bool at_work;                   /* the chip has been, for WARM_MS */
};

#define LT_TRY(c, call, what, err)                                                          \
    do {                                                                                    \
        cublasStatus_t lt_try_ = (call);                                                    \
        if (lt_try_ != CUBLAS_STATUS_SUCCESS)                                               \
            return fb_cuda_fail_text(c, cublasLtGetStatusString(lt_try_), what, err);       \
    } while (0)

static uint32_t alignment_of(const void *p)
{
    uintptr_t lowest = (uintptr_t)p & -(uintptr_t)p;
    return lowest == 0 || lowest > ALIGNMENT_MAX ? ALIGNMENT_MAX : (uint32_t)lowest;
}

/* FNV-1a, by words. */
static uint64_t facts_hash(const facts *f)
{
    uint32_t word[sizeof *f / sizeof(uint32_t)];
    memcpy(word, f, sizeof word);
    uint64_t h = UINT64_C(14695981039346656037);
    for (size_t i = 0; i < FB_COUNT(word); i++)
        h = (h ^ word[i]) * UINT64_C(1099511628211);
    return h ^ h >> 32;
}

static cublasStatus_t layout_init(cublasLtMatrixLayout_t layout, uint32_t type, bool trans, uint32_t rows,
                                  uint32_t cols, uint64_t ld)
{
    return cublasLtMatrixLayoutInit(layout, (cudaDataType_t)type, trans ? cols : rows, trans ? rows : cols, (int64_t)ld);
}

#define SET(descriptor, name, value)                                                                    \
    cublasLtMatmulDescSetAttribute(descriptor, CUBLASLT_MATMUL_DESC_##name, &(value), sizeof(value))
#define PREFER(preference, name, value)                                                                 \
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_##name, &(value), sizeof(value))

static fb_status plan_describe(fb_cuda *c, plan *p, const facts *f, const void *bias, const char *what, fb_error *err)
{
    p->used = 0;
    p->f = *f;
    cublasOperation_t a_op = f->a_trans ? CUBLAS_OP_T : CUBLAS_OP_N, b_op = f->b_trans ? CUBLAS_OP_T : CUBLAS_OP_N;
    LT_TRY(c, cublasLtMatmulDescInit(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F), what, err);
    LT_TRY(c, SET(&p->product, TRANSA, a_op), what, err);
    LT_TRY(c, SET(&p->product, TRANSB, b_op), what, err);
    if (f->has_bias) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        LT_TRY(c, SET(&p->product, EPILOGUE, epilogue), what, err);
        LT_TRY(c, SET(&p->product, BIAS_POINTER, bias), what, err);
    }
    LT_TRY(c, layout_init(&p->a, f->type, f->a_trans, f->m, f->k, f->a_ld), what, err);
    LT_TRY(c, layout_init(&p->b, f->type, f->b_trans, f->k, f->n, f->b_ld), what, err);
    LT_TRY(c, layout_init(&p->c, f->d_type, false, f->m, f->n, f->c_ld), what, err);
    LT_TRY(c, layout_init(&p->d, f->d_type, false, f->m, f->n, f->d_ld), what, err);
    return FB_OK;
}

/* The heuristic's best for a plan that is described, at most n_max, the best first; at least one. */
static fb_status proposals_get(fb_cuda *c, plan *p, proposal *out, int n_max, int *n, const char *what, fb_error *err)
{
    const facts *f = &p->f;
    cublasLtMatmulPreferenceOpaque_t preference;
    uint64_t workspace = FB_CUDA_WORKSPACE_SIZE;
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    LT_TRY(c, cublasLtMatmulPreferenceInit(&preference), what, err);
    LT_TRY(c, PREFER(&preference, MAX_WORKSPACE_BYTES, workspace), what, err);
    LT_TRY(c, PREFER(&preference, REDUCTION_SCHEME_MASK, reduction), what, err);
    LT_TRY(c, PREFER(&preference, MIN_ALIGNMENT_A_BYTES, f->a_alignment), what, err);
    LT_TRY(c, PREFER(&preference, MIN_ALIGNMENT_B_BYTES, f->b_alignment), what, err);
    LT_TRY(c, PREFER(&preference, MIN_ALIGNMENT_C_BYTES, f->c_alignment), what, err);
    LT_TRY(c, PREFER(&preference, MIN_ALIGNMENT_D_BYTES, f->d_alignment), what, err);
    *n = 0;
    LT_TRY(c, cublasLtMatmulAlgoGetHeuristic(c->matmul->handle, &p->product, &p->a, &p->b, &p->c, &p->d, &preference, n_max,
                                             out, n), what, err);
    if (*n == 0)
        return fb_cuda_fail_text(c, "cuBLASLt has no algorithm for this shape", what, err);
    LT_TRY(c, out[0].state, what, err);
    return FB_OK;
}

static cublasStatus_t product_launch(fb_cuda *c, plan *p, const operands *o, const cublasLtMatmulAlgo_t *algo)
{
    float alpha = 1.0f, beta = p->f.has_c ? 1.0f : 0.0f;
    return cublasLtMatmul(c->matmul->handle, &p->product, &alpha, o->a, &p->a, o->b, &p->b, &beta, o->c, &p->c, o->d, &p->d,
                          algo, c->workspace, FB_CUDA_WORKSPACE_SIZE, fb_cuda_compute(c));
}

/* ---- choosing by measurement ---- */

static bool sums_in_place(const facts *f, const operands *o)
{
    return f->has_c && o->c == o->d;
}

/* The tokens are what tn sums over, and the columns of nt's and nn's transposed results. */
static uint32_t *tokens_of(facts *f)
{
    return f->b_trans ? &f->k : &f->n;
}

static facts class_of(const facts *f)
{
    facts g = *f;
    uint32_t *tokens = tokens_of(&g), up = 1;
    while (up < *tokens && up < TRIAL_TOKENS_MAX)
        up *= 2;
    *tokens = up;
    return g;
}

/* The class that differs in overwriting d, where this one adds to it in place. */
static facts sibling_of(const facts *f)
{
    facts g = *f;
    g.has_c = 0;
    g.c_ld = g.d_ld;
    g.c_alignment = g.d_alignment;
    return g;
}

static choice *choice_find(fb_cuda_matmul_state *s, const facts *f)
{
    for (choice *h = s->choices; h < s->choices + CHOICE_MAX; h++)
        if (h->used && memcmp(&h->f, f, sizeof *f) == 0) {
            h->used = ++s->clock;
            return h;
        }
    return NULL;
}

static choice *choice_add(fb_cuda_matmul_state *s, const facts *f, const cublasLtMatmulAlgo_t *algo)
{
    choice *oldest = s->choices;
    for (choice *h = s->choices; h < s->choices + CHOICE_MAX; h++)
        if (h->used < oldest->used)
            oldest = h;
    oldest->f = *f;
    oldest->used = ++s->clock;
    oldest->algo = *algo;
    return oldest;
}

/* The first of n times, unless another is less by more than noise. */
static int choose(const float *ms, int n)
{
    int best = (int)(std::min_element(ms, ms + n) - ms);
    return ms[0] > ms[best] * (1 + GAIN_MIN) ? best : 0;
}

static fb_status put_to_work(fb_cuda *c, plan *p, const operands *o, const proposal *first, const char *what, fb_error *err)
{
    cudaStream_t stream = fb_cuda_compute(c);
    cudaEvent_t *event = c->matmul->event;
    FB_CUDA_TRY(c, cudaEventRecord(event[0], stream), what, err);
    for (float ms = 0; ms < WARM_MS;) {
        for (int i = 0; i < 16; i++)
            if (product_launch(c, p, o, &first->algo) != CUBLAS_STATUS_SUCCESS)
                return FB_OK; /* its own run will say so */
        FB_CUDA_TRY(c, cudaEventRecord(event[1], stream), what, err);
        FB_CUDA_TRY(c, cudaEventSynchronize(event[1]), what, err);
        FB_CUDA_TRY(c, cudaEventElapsedTime(&ms, event[0], event[1]), what, err);
    }
    c->matmul->at_work = true;
    return FB_OK;
}

/* Median milliseconds of each proposal, in rounds, so that a clock that drifts does not decide; INFINITY: it does not run here,
 * which is no error.  d is written many times over, and so grows where it is summed in place. */
static fb_status proposals_time(fb_cuda *c, plan *p, const operands *o, const proposal *tried, int n, float *ms, const char *what,
                                fb_error *err)
{
    cudaStream_t stream = fb_cuda_compute(c);
    cudaEvent_t *event = c->matmul->event;
    bool runs[PROPOSAL_MAX];
    assert(n <= PROPOSAL_MAX);
    for (int i = 0; i < n; i++) /* loads its code */
        runs[i] = tried[i].state == CUBLAS_STATUS_SUCCESS && tried[i].workspaceSize <= FB_CUDA_WORKSPACE_SIZE
                  && product_launch(c, p, o, &tried[i].algo) == CUBLAS_STATUS_SUCCESS;
    FB_CUDA_TRY(c, cudaEventRecord(*event, stream), what, err);
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < n; i++) {
            runs[i] = runs[i] && product_launch(c, p, o, &tried[i].algo) == CUBLAS_STATUS_SUCCESS;
            FB_CUDA_TRY(c, cudaEventRecord(event[1 + round * n + i], stream), what, err);
        }
    cudaGetLastError(); /* a refused launch's; one that ruins the context shows again */
    FB_CUDA_TRY(c, cudaStreamSynchronize(stream), what, err);
    for (int i = 0; i < n; i++) {
        float t[ROUNDS];
        for (int round = 0; round < ROUNDS; round++)
            FB_CUDA_TRY(c, cudaEventElapsedTime(&t[round], event[round * n + i], event[1 + round * n + i]), what, err);
        std::sort(t, t + ROUNDS);
        ms[i] = runs[i] ? t[ROUNDS / 2] : INFINITY;
    }
    return FB_OK;
}

/* Whether an algorithm that was measured with another number of tokens runs this product too. */
static bool plan_takes(fb_cuda *c, plan *p, const cublasLtMatmulAlgo_t *algo)
{
    proposal r;
    return cublasLtMatmulAlgoCheck(c->matmul->handle, &p->product, &p->a, &p->b, &p->c, &p->d, algo, &r) == CUBLAS_STATUS_SUCCESS
           && r.workspaceSize <= FB_CUDA_WORKSPACE_SIZE;
}

static bool worth_measuring(const facts *f)
{
    return (double)f->m * f->n * f->k >= (double)MEASURED_SIDE * MEASURED_SIDE * MEASURED_SIDE;
}

/* On the first tokens of the product's own operands, where it has more than trials take: what they leave is written again by the
 * product itself. */
static fb_status class_measure(fb_cuda *c, const facts *f, const operands *o, const facts *kin, choice **known, const char *what,
                               fb_error *err)
{
    plan trial;
    proposal proposals[PROPOSAL_MAX];
    float ms[PROPOSAL_MAX];
    int n;
    facts part = *f;
    uint32_t *tokens = tokens_of(&part);
    *tokens = std::min(*tokens, TRIAL_TOKENS_MAX);
    FB_CUDA_OK(plan_describe(c, &trial, &part, o->bias, what, err));
    FB_CUDA_OK(proposals_get(c, &trial, proposals, PROPOSAL_MAX, &n, what, err));
    if (!c->matmul->at_work)
        FB_CUDA_OK(put_to_work(c, &trial, o, proposals, what, err));
    FB_CUDA_OK(proposals_time(c, &trial, o, proposals, n, ms, what, err));
    *known = choice_add(c->matmul, kin, &proposals[choose(ms, n)].algo);
    return FB_OK;
}

/* ---- plans ---- */

static fb_status plan_make(fb_cuda *c, plan *p, const facts *f, const operands *o, const char *what, fb_error *err)
{
    fb_cuda_matmul_state *s = c->matmul;
    facts kin = class_of(f), sibling = sibling_of(&kin);
    bool in_place = sums_in_place(f, o);
    choice *known = NULL;
    if (!c->deterministic) {
        known = choice_find(s, &kin);
        if (!known && in_place)
            known = choice_find(s, &sibling);
    }
    bool measure = !c->deterministic && !known && !in_place && worth_measuring(f);
    proposal first;
    int n;
    FB_CUDA_OK(plan_describe(c, p, f, o->bias, what, err));
    FB_CUDA_OK(proposals_get(c, p, &first, 1, &n, what, err));
    if (measure)
        FB_CUDA_OK(class_measure(c, f, o, &kin, &known, what, err));
    p->first = first.algo;
    p->algo = known && plan_takes(c, p, &known->algo) ? known->algo : p->first;
    return FB_OK;
}

static fb_status plan_find(fb_cuda *c, plan **out, const facts *f, const operands *o, const char *what, fb_error *err)
{
    fb_cuda_matmul_state *s = c->matmul;
    plan *set = s->table[facts_hash(f) % SET_COUNT], *oldest = set;
    for (int i = 0; i < WAYS; i++) {
        if (set[i].used && memcmp(&set[i].f, f, sizeof *f) == 0) {
            set[i].used = ++s->clock;
            *out = &set[i];
            return FB_OK;
        }
        if (set[i].used < oldest->used)
            oldest = &set[i];
    }
    FB_CUDA_OK(plan_make(c, oldest, f, o, what, err));
    oldest->used = ++s->clock;
    *out = oldest;
    return FB_OK;
}

/* What of the facts follows from the operands. */
static void facts_complete(facts *f, operands *o)
{
    f->has_bias = o->bias != NULL;
    f->has_c = o->c != NULL;
    if (!o->c) {
        o->c = o->d; /* not read: beta is 0 */
        f->c_ld = f->d_ld;
    }
    f->a_alignment = alignment_of(o->a);
    f->b_alignment = alignment_of(o->b);
    f->c_alignment = alignment_of(o->c);
    f->d_alignment = alignment_of(o->d);
}

static fb_status product_run(fb_cuda *c, facts f, operands o, const char *what, fb_error *err)
{
    if (f.m == 0 || f.n == 0)
        return FB_OK;
    assert(f.k > 0);
    facts_complete(&f, &o);
    plan *p;
    FB_CUDA_OK(plan_find(c, &p, &f, &o, what, err));
    if (o.bias)
        LT_TRY(c, SET(&p->product, BIAS_POINTER, o.bias), what, err);
    cublasStatus_t status = product_launch(c, p, &o, &p->algo);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED && memcmp(&p->algo, &p->first, sizeof p->first) != 0) {
        p->algo = p->first; /* the library's check promises less than its run asks for */
        status = product_launch(c, p, &o, &p->algo);
    }
    LT_TRY(c, status, what, err);
    return FB_OK;
}

static uint32_t type_of(fb_dtype t)
{
    assert(t == FB_F32 || t == FB_BF16);
    return t == FB_F32 ? CUDA_R_32F : CUDA_R_16BF;
}

/* ---- float32 results of bfloat16 operands with bfloat16 bias or addend, which the library does not mix ---- */

typedef struct finish_args {
    uint32_t m, n;
    const __nv_bfloat16 *bias, *add;
    uint64_t add_ld, y_ld;
    float *y;
} finish_args;

/* y = y + bias + add */
static __global__ void finish_kernel(finish_args f)
{
    uint64_t n = (uint64_t)f.m * f.n, step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        uint64_t row = i / f.n, col = i % f.n;
        float y = f.y[row * f.y_ld + col];
        if (f.bias)
            y += __bfloat162float(f.bias[col]);
        if (f.add)
            y += __bfloat162float(f.add[row * f.add_ld + col]);
        f.y[row * f.y_ld + col] = y;
    }
}

/* A bfloat16 bias or addend of a float32 result is none of the library's. */
static bool is_mixed(const fb_matmul_nt *a)
{
    return a->act != a->y_dtype && (a->bias || a->add);
}

static facts nt_facts(const fb_matmul_nt *a)
{
    return { .a_trans = 1, .type = type_of(a->act), .d_type = type_of(a->y_dtype), .m = a->n, .n = a->m, .k = a->k,
             .a_ld = a->w_ld, .b_ld = a->x_ld, .c_ld = a->add_ld, .d_ld = a->y_ld };
}

static operands nt_operands(const fb_matmul_nt *a)
{
    return { a->w, a->x, is_mixed(a) ? NULL : a->bias, is_mixed(a) ? NULL : a->add, a->y };
}

static facts nn_facts(const fb_matmul_nn *a)
{
    return { .type = type_of(a->act), .d_type = type_of(a->act), .m = a->k, .n = a->m, .k = a->n, .a_ld = a->w_ld,
             .b_ld = a->dy_ld, .d_ld = a->dx_ld };
}

static operands nn_operands(const fb_matmul_nn *a)
{
    return { a->w, a->dy, NULL, NULL, a->dx };
}

static facts tn_facts(const fb_matmul_tn *a)
{
    return { .b_trans = 1, .type = type_of(a->act), .d_type = CUDA_R_32F, .m = a->k, .n = a->n, .k = a->m,
             .a_ld = a->x_ld, .b_ld = a->dy_ld, .c_ld = a->k, .d_ld = a->k };
}

static operands tn_operands(const fb_matmul_tn *a)
{
    return { a->x, a->dy, NULL, a->accumulate ? a->dw : NULL, a->dw };
}

fb_status fb_cuda_matmul_nt(fb_device *d, const fb_matmul_nt *a, fb_error *err)
{
    fb_cuda *c = fb_cuda_enter(d);
    assert(a->act == FB_BF16 || a->y_dtype == FB_F32);
    FB_CUDA_OK(product_run(c, nt_facts(a), nt_operands(a), "matmul_nt", err));
    if (!is_mixed(a) || a->m == 0 || a->n == 0)
        return FB_OK;
    assert(a->add != a->y); /* their elements differ in size */
    finish_args g = { a->m, a->n, (const __nv_bfloat16 *)a->bias, (const __nv_bfloat16 *)a->add, a->add_ld, a->y_ld,
                      (float *)a->y };
    finish_kernel<<<8 * c->n_sm, 256, 0, fb_cuda_compute(c)>>>(g);
    return fb_cuda_launched(c, "matmul_nt", err);
}

fb_status fb_cuda_matmul_nn(fb_device *d, const fb_matmul_nn *a, fb_error *err)
{
    return product_run(fb_cuda_enter(d), nn_facts(a), nn_operands(a), "matmul_nn", err);
}

fb_status fb_cuda_matmul_tn(fb_device *d, const fb_matmul_tn *a, fb_error *err)
{
    return product_run(fb_cuda_enter(d), tn_facts(a), tn_operands(a), "matmul_tn", err);
}

/* ---- opening ---- */

/* Runs each product of each dtype once: the libraries load code at the first use, and its memory is to be counted. */
static fb_status warm_with(fb_cuda *c, unsigned char *mem, uint32_t n, fb_dtype act, fb_error *err)
{
    uint64_t size = (uint64_t)n * n * sizeof(float);
    unsigned char *x = mem, *w = mem + size, *y = mem + 2 * size;
    for (int fused = 0; fused < 2; fused++) {
        fb_matmul_nt nt = { act, act, n, n, n, x, n, w, n, fused ? x : NULL, fused ? y : NULL, n, y, n };
        FB_CUDA_OK(fb_cuda_matmul_nt(&c->device, &nt, err));
        fb_matmul_tn tn = { act, n, n, n, x, n, w, n, (float *)y, fused != 0 };
        FB_CUDA_OK(fb_cuda_matmul_tn(&c->device, &tn, err));
    }
    fb_matmul_nt logits = { act, FB_F32, n, n, n, x, n, w, n, NULL, NULL, 0, y, n };
    FB_CUDA_OK(fb_cuda_matmul_nt(&c->device, &logits, err));
    fb_matmul_nn nn = { act, n, n, n, x, n, w, n, y, n };
    return fb_cuda_matmul_nn(&c->device, &nn, err);
}

static fb_status warm(fb_cuda *c, fb_error *err)
{
    static const uint32_t size[] = { 256, MEASURED_SIDE };
    const uint64_t mem_size = 3 * (uint64_t)MEASURED_SIDE * MEASURED_SIDE * sizeof(float);
    unsigned char *mem;
    FB_CUDA_TRY(c, cudaMalloc(&mem, mem_size), "memory to warm the matrix products up", err);
    fb_status st = FB_OK;
    cudaError_t e = cudaMemsetAsync(mem, 0, mem_size, fb_cuda_compute(c));
    for (size_t i = 0; st == FB_OK && e == cudaSuccess && i < FB_COUNT(size); i++) {
        st = warm_with(c, mem, size[i], FB_BF16, err);
        if (st == FB_OK)
            st = warm_with(c, mem, size[i], FB_F32, err);
    }
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(fb_cuda_compute(c));
    cudaFree(mem);
    if (st == FB_OK && e != cudaSuccess)
        st = fb_cuda_fail(c, e, "the first matrix products", err);
    /* What zeros have chosen, which take less power than numbers do, binds nobody. */
    for (choice *h = c->matmul->choices; h < c->matmul->choices + CHOICE_MAX; h++)
        h->used = 0;
    for (plan *p = c->matmul->table[0]; p < c->matmul->table[SET_COUNT]; p++)
        p->used = 0;
    return st;
}

static fb_status start(fb_cuda *c, fb_error *err)
{
    LT_TRY(c, cublasLtCreate(&c->matmul->handle), "cuBLASLt's start", err);
    for (int i = 0; !c->deterministic && i < EVENT_COUNT; i++)
        FB_CUDA_TRY(c, cudaEventCreate(&c->matmul->event[i]), "making an event", err);
    c->matmul->at_work = true; /* what opening measures does not count */
    fb_status st = warm(c, err);
    c->matmul->at_work = false;
    return st;
}

fb_status fb_cuda_matmul_init(fb_cuda *c, fb_error *err)
{
    c->matmul = (fb_cuda_matmul_state *)calloc(1, sizeof *c->matmul);
    if (!c->matmul)
        return fb_fail(err, FB_NOMEM, "cuda: no host memory for the plans of matrix products, %zu bytes",
                       sizeof *c->matmul);
    fb_status st = start(c, err);
    if (st != FB_OK)
        fb_cuda_matmul_deinit(c);
    return st;
}

void fb_cuda_matmul_deinit(fb_cuda *c)
{
    if (!c->matmul)
        return;
    if (c->matmul->handle)
        cublasLtDestroy(c->matmul->handle);
    for (int i = 0; i < EVENT_COUNT; i++)
        if (c->matmul->event[i])
            cudaEventDestroy(c->matmul->event[i]);
    free(c->matmul);
    c->matmul = NULL;
}
