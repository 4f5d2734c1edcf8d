#include "run/trainlog.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/file.h"
#include "io/sys.h"

static const uint64_t LOG_SIZE_MAX = UINT64_C(1) << 30;

/* The lines to keep, moved to the front of text; returns their length. */
static size_t keep_lines(char *text, uint64_t steps_kept)
{
    size_t kept = 0;
    for (char *line = text, *end; *line; line = end) {
        end = strchr(line, '\n');
        if (!end)
            break; /* a line that was being written when the run died */
        end++;
        json_t *o = json_loadb(line, (size_t)(end - line), 0, NULL);
        const json_t *step = json_object_get(o, "current_steps");
        if (json_is_integer(step) && json_integer_value(step) >= 0 && (uint64_t)json_integer_value(step) <= steps_kept) {
            memmove(text + kept, line, (size_t)(end - line));
            kept += (size_t)(end - line);
        }
        json_decref(o);
    }
    return kept;
}

fb_status fb_trainlog_open(fb_trainlog *l, const char *output_dir, uint64_t steps_kept, fb_error *err)
{
    fb_status st = FB_OK;
    char path[FB_PATH_SIZE], *text = NULL;
    *l = (fb_trainlog){ 0 };
    FB_TRY(fb_path_join(path, sizeof path, output_dir, "trainer_log.jsonl", err));
    size_t kept = 0;
    uint64_t size;
    if (steps_kept && fb_file_exists(path)) {
        FB_TRY(fb_file_read(&text, &size, path, LOG_SIZE_MAX, err));
        kept = keep_lines(text, steps_kept);
    }
    FB_TRY(fb_file_write_atomic(path, text ? text : "", kept, err));
    l->fd = fb_sys_open(path, O_WRONLY | O_APPEND | O_CLOEXEC, 0);
    if (l->fd < 0)
        FB_TRY(fb_fail_file(err, FB_IO, path, "cannot be opened for writing: %s", strerror(errno)));
    l->path = strdup(path);
    if (!l->path) {
        close(l->fd);
        FB_TRY(fb_fail_file(err, FB_NOMEM, path, "no memory for its name"));
    }
done:
    free(text);
    return st;
}

fb_status fb_trainlog_write(fb_trainlog *l, json_t *line, fb_error *err)
{
    char *text = line ? json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(line);
    if (!text)
        return fb_fail_file(err, FB_NOMEM, l->path, "no memory for a line");
    size_t length = strlen(text);
    text[length] = '\n'; /* in the terminator's place: a line is one write */
    fb_status st = fb_file_write_all(l->fd, l->path, text, length + 1, err);
    free(text);
    return st;
}

fb_status fb_trainlog_sync(fb_trainlog *l, fb_error *err)
{
    if (fb_sys_fsync(l->fd) != 0 && errno != EINVAL)
        return fb_fail_file(err, FB_IO, l->path, "cannot be made durable: %s", strerror(errno));
    return FB_OK;
}

void fb_trainlog_close(fb_trainlog *l)
{
    if (!l->path)
        return;
    close(l->fd);
    free(l->path);
    *l = (fb_trainlog){ 0 };
}
