/* compat.h - keys of LlamaFactory and Hugging Face that a configuration may carry although nothing here depends on them.
 *
 * Each is one row: accepted as it stands, or only with the values that mean what happens here anyway.  Never accepted
 * and quietly not done: what would change the result is refused with the reason. */
#ifndef FB_CONFIG_COMPAT_H
#define FB_CONFIG_COMPAT_H

#include <stddef.h>

typedef struct fb_compat {
    const char *name;
    const char *only;   /* NULL: any value; else the accepted ones, separated by | */
    const char *reason; /* why it changes nothing, or why other values are refused */
} fb_compat;

extern const fb_compat fb_compat_key[];
extern const size_t    fb_compat_count;

#endif
