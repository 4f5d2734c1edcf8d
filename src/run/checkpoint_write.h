/* checkpoint_write.h - the large files of a checkpoint, written piece by piece.
 *
 *   model*.safetensors      the weights in save_dtype, as Hugging Face has them; bfloat16: hi of the split master
 *   remainders.safetensors  save_dtype bfloat16: lo of the split master, I16
 *   masters.safetensors     save_dtype float16: the masters, F32
 *   adam_m.safetensors, adam_v.safetensors  the moments, F32
 * Tensors have the model's names and shapes and stand in the order in which blocks are written, so every file grows at its end
 * alone and is summed as it grows.  12 bytes a parameter; 14 with float16, which no remainder of 16 bits completes.
 * Threads: one. */
#ifndef FB_RUN_CHECKPOINT_WRITE_H
#define FB_RUN_CHECKPOINT_WRITE_H

#include "io/sums.h"
#include "model/manifest.h"

typedef struct fb_checkpoint_writer fb_checkpoint_writer;

/* Elements of a block, as the state holds them. */
typedef struct fb_piece {
    fb_dtype     dtype;      /* of weights: F32, the master; BF16, its hi */
    const void  *weights;
    const int16_t *remainders; /* BF16 alone */
    const float *m, *v;
} fb_piece;

/* order: all blocks, as they will be written. */
fb_status fb_checkpoint_writer_new(fb_checkpoint_writer **out, const fb_manifest *m, const uint32_t *order, const char *dir,
                                   fb_dtype save_dtype, fb_error *err);
/* Elements [first, first + n) of a block's extent.  Blocks come in order, a block's pieces without gap. */
fb_status fb_checkpoint_writer_append(fb_checkpoint_writer *w, uint32_t block, uint64_t first, uint64_t n, const fb_piece *piece,
                                      fb_error *err);
/* Everything was appended: the files are durable and in the list.  Frees w whatever happens. */
fb_status fb_checkpoint_writer_finish(fb_checkpoint_writer *w, fb_sums *sums, fb_error *err);
void      fb_checkpoint_writer_abandon(fb_checkpoint_writer *w); /* NULL is fine */
/* Bytes of all these files, headers left out. */
uint64_t  fb_checkpoint_size(const fb_manifest *m, fb_dtype save_dtype);

extern const char fb_remainders_file[], fb_masters_file[], fb_adam_m_file[], fb_adam_v_file[];

#endif
