/* json.h - reading typed fields of a JSON file that may say anything. */
#ifndef FB_IO_JSON_H
#define FB_IO_JSON_H

#include <jansson.h>

#include "base/error.h"

/* The first refusal sticks: later reads do nothing, so that a run of them needs one check. */
typedef struct fb_json_reader {
    const char   *where; /* path, for the sentence */
    const json_t *root;  /* of the reader's own use */
    fb_error     *err;
    fb_status     st;
} fb_json_reader;

/* FB_INPUT, unless something was refused before. */
void fb_json_refuse(fb_json_reader *r, const char *fmt, ...) FB_PRINTF(2, 3);

enum { FB_JSON_SHOWN_SIZE = 64 };
/* A value as a message shows it. */
const char *fb_json_show(char buf[FB_JSON_SHOWN_SIZE], const json_t *value);

#endif
