/* plan_html.h - an outlook as one page: no script, nothing from elsewhere. */
#ifndef FB_RUN_PLAN_HTML_H
#define FB_RUN_PLAN_HTML_H

#include "run/outlook.h"

fb_status fb_plan_html(const fb_outlook *o, const char *path, fb_error *err);

#endif
