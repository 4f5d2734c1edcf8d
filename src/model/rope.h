/* rope.h - rotary position tables.  Source: Su et al. 2021, eq. 34; scalings as transformers 5.17
 * modeling_rope_utils defines them (linear, dynamic NTK, YaRN: Peng et al. 2023, llama3). */
#ifndef FB_MODEL_ROPE_H
#define FB_MODEL_ROPE_H

#include "model/config.h"

/* Dynamic NTK depends on the longest row seen: transformers keeps the largest length so far, and falls back to
 * the original frequencies when a row shorter than the original context comes.  We do exactly the same, as a
 * state that is advanced once per micro-batch, in order, and travels in checkpoints.  Other types ignore it. */
typedef struct fb_rope_state {
    uint32_t len_cached; /* 0: nothing seen yet */
} fb_rope_state;

/* Advances the state by a micro-batch whose longest row has len tokens.  Returns true when the table changes. */
bool fb_rope_advance(fb_rope_state *s, const fb_model_config *c, uint32_t len);

/* inv_freq[head_dim / 2], float32 as transformers computes it; *scale multiplies cos and sin. */
void fb_rope_frequencies(float *inv_freq, float *scale, const fb_model_config *c, const fb_rope_state *s);

/* cos, sin: [n_position][head_dim / 2], row-major; angle = (float)position * inv_freq, rounded to float32 before the
 * cosine, as transformers does. */
void fb_rope_table(float *cos, float *sin, uint32_t n_position, const fb_model_config *c, const fb_rope_state *s);

#endif
