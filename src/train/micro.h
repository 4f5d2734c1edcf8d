/* micro.h - one micro-batch: documents laid end to end, and everything the kernels want to know about them.
 *
 * A row is one document, or several packed ones; a document is a fb_span, never attends across its border, and its
 * positions start at 0.  There is no padding: T is the number of real tokens.
 * The arrays live in one pinned host buffer with the layout of fb_micro_layout, and travel to the device in one
 * copy; `host` and `device` addresses of an array differ only by the base.
 * Nothing allocates: the buffer is sized for t_max tokens at start. */
#ifndef FB_TRAIN_MICRO_H
#define FB_TRAIN_MICRO_H

#include "device/kernels.h"

/* The arrays, each t_max entries (start: t_max + 1). */
typedef struct fb_micro_arrays {
    uint32_t *id;            /* [T] token ids, in order; the host gathers the embedding rows by them */
    uint32_t *position;      /* [T] in the document */
    fb_span  *span;          /* [n_span] documents */
    uint32_t *learn_index;   /* [n_learned] positions whose next token is learned, ascending */
    uint32_t *target;        /* [n_learned] that next token */
    uint32_t *embed_id, *embed_start, *embed_order; /* as fb_embed_grad wants them: sorted by id, then position */
} fb_micro_arrays;

typedef struct fb_micro {
    uint32_t t_max;
    int64_t  pad;     /* the model's padding token: its row takes no gradient as an input, as in torch's Embedding; -1: none */
    uint32_t t, n_span, n_learned, n_unique;
    uint32_t len_max; /* the longest document: rope tables and attention are cut for it */
    fb_micro_arrays host;
} fb_micro;

uint64_t        fb_micro_size(uint32_t t_max);                      /* bytes of the buffer, a multiple of 256 */
fb_micro_arrays fb_micro_at(void *base, uint32_t t_max);            /* where each array lies */
void            fb_micro_init(fb_micro *m, void *buffer, uint32_t t_max, int64_t pad);

/* Empty it, add documents, finish (sorts for the embedding gradient). */
void fb_micro_begin(fb_micro *m);
/* labels[i] is the token to be learned at position i of the document, or FB_LABEL_NONE; labels[0] is passed over.
 * labels NULL: nothing is learned.  The caller has checked that it fits. */
void fb_micro_add_document(fb_micro *m, const uint32_t *ids, const int32_t *labels, uint32_t n);
void fb_micro_finish(fb_micro *m);

#endif
