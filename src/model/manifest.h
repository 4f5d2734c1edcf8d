/* manifest.h - every tensor of a model: name, shape, role, block, and its place in the block's extent.
 *
 * Block 0 is the embedding, blocks 1..n_layer the decoder layers, the last one the final norm and the head.  A
 * block's parameters lie in one extent, in table order; each starts at a multiple of FB_EXTENT_ALIGN elements,
 * except those flagged FB_P_JOIN, which follow their predecessor without padding (q,k,v and gate,up are one matrix
 * each).  Padding elements are zero, have zero gradients and stay zero.  The same offsets serve every component
 * (hi, lo, m, v, gradient) on either side of the link.
 * Tied: the last block has no FB_ROLE_HEAD parameter; the head is block 0's table. */
#ifndef FB_MODEL_MANIFEST_H
#define FB_MODEL_MANIFEST_H

#include "model/arch.h"
#include "io/shard.h"

/* Elements; of blocks that lie end to end: 256 bytes in bfloat16. */
enum { FB_EXTENT_ALIGN = 64, FB_BLOCK_ALIGN = 128, FB_NAME_SIZE = 96 };

typedef enum { FB_BLOCK_EMBED, FB_BLOCK_LAYER, FB_BLOCK_FINAL } fb_block_kind;

typedef struct fb_param {
    char     name[FB_NAME_SIZE]; /* full name in the checkpoint */
    fb_role  role;
    uint32_t block;
    uint32_t rank;               /* 1 or 2 */
    uint64_t rows, cols;         /* cols is 1 for a vector */
    uint64_t offset;             /* elements, in the block's extent */
    bool     decay;              /* weight decay applies */
} fb_param;

typedef struct fb_block_desc {
    fb_block_kind kind;
    uint32_t      layer;                /* index among decoder layers, for FB_BLOCK_LAYER */
    uint32_t      param_first, n_param; /* into fb_manifest.params */
    uint64_t      extent;               /* elements, padding included, a multiple of FB_EXTENT_ALIGN */
    uint64_t      before;               /* fb_block_span of the blocks before it, summed */
    int64_t       offset[FB_ROLE_COUNT]; /* elements in the extent; -1: the role is absent */
} fb_block_desc;

typedef struct fb_manifest {
    fb_model_config cfg;
    fb_param       *params;
    uint32_t        n_param;
    fb_block_desc  *blocks;
    uint32_t        n_block;   /* n_layer + 2 */
    uint64_t        n_weight;  /* parameters, without padding, a tied head counted once */
    uint64_t        extent;    /* sum over blocks, elements */
    uint64_t        extent_max_layer; /* largest layer extent */
} fb_manifest;

/* Elements that a block takes where blocks lie end to end. */
static inline uint64_t fb_block_span(const fb_block_desc *b)
{
    return (b->extent + FB_BLOCK_ALIGN - 1) / FB_BLOCK_ALIGN * FB_BLOCK_ALIGN;
}

/* Takes over cfg (frees it on failure too).  The sentence is about config.json and does not name it. */
fb_status fb_manifest_build(fb_manifest *out, fb_model_config *cfg, fb_error *err);
/* Reads DIR/config.json and builds. */
fb_status fb_manifest_read(fb_manifest *out, const char *dir, fb_error *err);
/* Every parameter is in the set, with the right shape and a float dtype; tensors that the table does not know are
 * refused by name, but for the ones that old checkpoints carry and transformers passes over (rotary inv_freq, a
 * lm_head.weight beside tied embeddings if it equals the table). */
fb_status fb_manifest_check(const fb_manifest *m, const fb_shard_set *s, fb_error *err);
void      fb_manifest_free(fb_manifest *m); /* a zeroed struct is fine */

#endif
