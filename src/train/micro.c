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

/* Heap sort of 64-bit keys (id, position): in place, no recursion, the same result whatever the library. */
static void sift(uint64_t *key, uint64_t root, uint64_t n)
{
    uint64_t value = key[root];
    for (uint64_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && key[child] < key[child + 1])
            child++;
        if (key[child] <= value)
            break;
        key[root] = key[child];
    }
    key[root] = value;
}

static void sort_keys(uint64_t *key, uint64_t n)
{
    for (uint64_t i = n / 2; i-- > 0;)
        sift(key, i, n);
    for (uint64_t i = n; i-- > 1;) {
        uint64_t top = key[0];
        key[0] = key[i];
        key[i] = top;
        sift(key, 0, i);
    }
}

void fb_micro_finish(fb_micro *m)
{
    fb_micro_arrays *a = &m->host;
    /* embed_id and embed_start are neighbours of 4 (t_max + 1) padded bytes each, so together they hold the keys. */
    uint64_t *key = (uint64_t *)(void *)a->embed_id;
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->t; i++)
        if ((int64_t)a->id[i] != m->pad)
            key[n++] = (uint64_t)a->id[i] << 32 | i;
    sort_keys(key, n);
    for (uint32_t i = 0; i < n; i++)
        a->embed_order[i] = (uint32_t)key[i];
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
