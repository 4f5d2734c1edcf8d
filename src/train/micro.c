#include "train/micro.h"

#include <assert.h>
#include <string.h>

#include "base/align.h"
#include "io/tokens.h"

enum { N_WORD_ARRAY = 7 };

uint64_t fb_micro_size(uint32_t t_max)
{
    return N_WORD_ARRAY * fb_align(sizeof(uint32_t) * ((uint64_t)t_max + 1)) + fb_align(sizeof(fb_span) * (uint64_t)t_max);
}

fb_micro_arrays fb_micro_at(void *base, uint32_t t_max)
{
    unsigned char *at = base;
    uint64_t word = fb_align(sizeof(uint32_t) * ((uint64_t)t_max + 1));
    fb_micro_arrays a;
    uint32_t **const arrays[N_WORD_ARRAY] = { &a.id, &a.position, &a.learn_index, &a.target,
                                              &a.embed_id, &a.embed_start, &a.embed_order };
    for (int i = 0; i < N_WORD_ARRAY; i++, at += word)
        *arrays[i] = (uint32_t *)(void *)at;
    a.span = (fb_span *)(void *)at;
    return a;
}

void fb_micro_init(fb_micro *m, void *buffer, uint32_t t_max, int64_t pad_id)
{
    *m = (fb_micro){ .t_max = t_max, .pad = pad_id, .host = fb_micro_at(buffer, t_max) };
}

void fb_micro_begin(fb_micro *m)
{
    m->t = m->n_span = m->n_learned = m->n_unique = m->len_max = 0;
}

void fb_micro_add_document(fb_micro *m, const uint32_t *ids, const int32_t *labels, uint32_t n)
{
    fb_micro_arrays *a = &m->host;
    uint32_t t0 = m->t;
    assert(n <= m->t_max - t0);
    if (!n)
        return;
    memcpy(a->id + t0, ids, n * sizeof *ids);
    for (uint32_t i = 0; i < n; i++)
        a->position[t0 + i] = i;
    for (uint32_t i = 1; labels && i < n; i++) {
        if (labels[i] == FB_LABEL_NONE)
            continue;
        a->learn_index[m->n_learned] = t0 + i - 1; /* the shift is ours */
        a->target[m->n_learned++] = (uint32_t)labels[i];
    }
    a->span[m->n_span++] = (fb_span){ t0, n, t0, n };
    m->t += n;
    if (n > m->len_max)
        m->len_max = n;
}

enum { DIGIT_BITS = 11, N_DIGIT = 3, N_BUCKET = 1 << DIGIT_BITS }; /* 33 bits: an id whole */

/* One pass of a radix sort: n indices, by one digit of their ids; those with the same digit stay in their order. */
static void sort_by_digit(uint32_t *out, const uint32_t *in, uint32_t n, const uint32_t *id, uint32_t digit)
{
    uint32_t shift = digit * DIGIT_BITS, next[N_BUCKET] = { 0 }, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        next[id[in[i]] >> shift & (N_BUCKET - 1)]++;
    for (uint32_t k = 0; k < N_BUCKET; k++) {
        uint32_t count = next[k];
        next[k] = sum;
        sum += count;
    }
    for (uint32_t i = 0; i < n; i++)
        out[next[id[in[i]] >> shift & (N_BUCKET - 1)]++] = in[i];
}

void fb_micro_finish(fb_micro *m)
{
    fb_micro_arrays *a = &m->host;
    uint32_t *from = a->embed_start, *to = a->embed_order, n = 0; /* the one has room to spare until it is filled below */
    for (uint32_t i = 0; i < m->t; i++)
        if ((int64_t)a->id[i] != m->pad)
            from[n++] = i;
    for (uint32_t digit = 0; digit < N_DIGIT; digit++) { /* an odd number of passes ends where the order belongs */
        sort_by_digit(to, from, n, a->id, digit);
        uint32_t *swapped = from;
        from = to;
        to = swapped;
    }
    m->n_unique = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = a->id[a->embed_order[i]];
        if (m->n_unique && a->embed_id[m->n_unique - 1] == id)
            continue;
        a->embed_id[m->n_unique] = id;
        a->embed_start[m->n_unique++] = i;
    }
    a->embed_start[m->n_unique] = n;
}
