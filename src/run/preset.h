/* preset.h - the shapes of well-known models, for `forebay bench`: no download needed. */
#ifndef FB_RUN_PRESET_H
#define FB_RUN_PRESET_H

#include "base/error.h"

enum { FB_PRESET_SIZE = 1024 };

/* name: "qwen2.5-7b", or with another number of layers "qwen2.5-7b:40".  Writes what stands in the model's config.json, as far as
 * it decides shapes and arithmetic.  FB_CONFIG: the name is unknown; the known ones are listed. */
fb_status fb_preset_config(char out[FB_PRESET_SIZE], const char *name, fb_error *err);
/* "qwen2.5-0.5b, ..." */
void      fb_preset_names(char *buf, size_t size);

#endif
