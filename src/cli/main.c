/* main.c - the command.  It parses words, prints, and turns a status into an exit code; all else is the library's. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bus_error.h"
#include "forebay/forebay.h"

static void say(void *ctx, fb_say_kind kind, const char *text)
{
    (void)ctx;
    FILE *out = kind == FB_SAY_RESULT || kind == FB_SAY_TEXT ? stdout : stderr;
    fprintf(out, "%s%s%s", kind == FB_SAY_WARNING ? "warning: " : "", text, kind == FB_SAY_TEXT ? "" : "\n");
    fflush(out);
}

static const fb_sink terminal = { say, NULL };

static int ended(fb_status st, const fb_error *err)
{
    if (st != FB_OK)
        fprintf(stderr, "forebay: %s\n", err->msg);
    return fb_status_exit_code(st);
}

/* ---- words ---- */

typedef struct words {
    const char *positional[2]; /* CONFIG, MODEL_DIR ... */
    int         n_positional;
    const char *overrides[256];
    int         n_override;
    bool        json;
    unsigned    preview;
    const char *preset, *model; /* bench */
    unsigned    steps;
    bool        alias_host;
    const char *out, *disk;     /* probe */
    fb_plan_view plan;
    char        trace[4200];    /* --trace FILE as a setting */
} words;

enum { TAKES_JSON = 1, TAKES_PREVIEW = 2, TAKES_BENCH = 4, TAKES_PROBE = 8, TAKES_PLAN = 16 };

static fb_status usage(fb_error *err, const char *why, const char *what, const char *form)
{
    *err = (fb_error){ .status = FB_CONFIG };
    snprintf(err->msg, sizeof err->msg, "%s%s%s; usage: forebay %s", why, *what ? " " : "", what, form);
    return FB_CONFIG;
}

/* key=value: a name, then '='. */
static bool is_override(const char *word)
{
    size_t n = strspn(word, "abcdefghijklmnopqrstuvwxyz0123456789_.");
    return n && word[n] == '=';
}

static bool read_count(const char *text, unsigned max, unsigned *out)
{
    char *end = NULL;
    unsigned long n = text ? strtoul(text, &end, 10) : 0;
    *out = (unsigned)n;
    return n && n <= max && !*end;
}

/* The field of an option of `plan`; NULL: it is none. */
static const char **plan_word(fb_plan_view *v, const char *word)
{
    const struct {
        const char *name, **field;
    } words_of_plan[] = { { "--machine", &v->machine }, { "--preset", &v->preset }, { "--hbm", &v->hbm }, { "--ram", &v->ram },
                          { "--link", &v->link }, { "--html", &v->html } };
    for (size_t i = 0; i < sizeof words_of_plan / sizeof *words_of_plan; i++)
        if (!strcmp(words_of_plan[i].name, word))
            return words_of_plan[i].field;
    return NULL;
}

static fb_status read_words(words *w, int argc, char **argv, int n_wanted, unsigned takes, const char *form, fb_error *err)
{
    *w = (words){ 0 };
    for (int i = 0; i < argc; i++) {
        const char *a = argv[i], *next = i + 1 < argc ? argv[i + 1] : NULL;
        if (takes & TAKES_JSON && !strcmp(a, "--json"))
            w->json = true;
        else if (takes & TAKES_PREVIEW && !strcmp(a, "--preview")) {
            if (!read_count(next, 100000, &w->preview))
                return usage(err, "--preview wants a number of rows, 1 to 100000", "", form);
            i++;
        } else if (takes & TAKES_BENCH && !strcmp(a, "--alias-host-memory")) {
            w->alias_host = true;
        } else if (takes & TAKES_BENCH && !strcmp(a, "--steps")) {
            if (!read_count(next, 10000, &w->steps))
                return usage(err, "--steps wants a number, 1 to 10000", "", form);
            i++;
        } else if (takes & TAKES_BENCH && (!strcmp(a, "--preset") || !strcmp(a, "--model") || !strcmp(a, "--trace"))) {
            if (!next)
                return usage(err, "nothing follows", a, form);
            if (!strcmp(a, "--preset"))
                w->preset = next;
            else if (!strcmp(a, "--model"))
                w->model = next;
            else if (snprintf(w->trace, sizeof w->trace, "trace=%s", next) >= (int)sizeof w->trace)
                return usage(err, "too long a name after --trace", "", form);
            i++;
        } else if (takes & TAKES_PROBE && (!strcmp(a, "--out") || !strcmp(a, "--disk"))) {
            if (!next)
                return usage(err, "nothing follows", a, form);
            *(a[2] == 'o' ? &w->out : &w->disk) = next;
            i++;
        } else if (takes & TAKES_PLAN && plan_word(&w->plan, a)) {
            if (!next)
                return usage(err, "nothing follows", a, form);
            *plan_word(&w->plan, a) = next;
            i++;
        } else if (a[0] == '-' && a[1])
            return usage(err, "unknown option", a, form);
        else if (w->n_positional < n_wanted && !(takes & TAKES_PLAN && is_override(a)))
            w->positional[w->n_positional++] = a;
        else if (is_override(a)) {
            if (w->n_override == (int)(sizeof w->overrides / sizeof *w->overrides))
                return usage(err, "too many settings", "", form);
            w->overrides[w->n_override++] = a;
        } else
            return usage(err, "one word too many:", a, form);
    }
    if (w->trace[0]) {
        if (w->n_override == (int)(sizeof w->overrides / sizeof *w->overrides))
            return usage(err, "too many settings", "", form);
        w->overrides[w->n_override++] = w->trace;
    }
    bool enough = w->n_positional == n_wanted || w->plan.preset; /* a shape needs no configuration file */
    return enough ? FB_OK : usage(err, "a word is missing", "", form);
}

/* ---- commands ---- */

static fb_job *running;

/* What ends a run.  SIGHUP too: the terminal went, the work should not go with it. */
static const int ending[] = { SIGTERM, SIGINT, SIGUSR1, SIGHUP };
enum { N_ENDING = sizeof ending / sizeof *ending };

/* The first signal ends the run after its step; the second, of whatever kind, ends the process. */
static void on_ending(int sig)
{
    static volatile sig_atomic_t n;
    if (n++) {
        signal(sig, SIG_DFL);
        raise(sig); /* when this handler has returned */
        return;
    }
    fb_job_stop(running);
}

static void on_quit(int sig)
{
    (void)sig;
    fb_job_report(running);
}

/* Whoever started us with a signal ignored (nohup, a shell's background) does not want it heard. */
static void handle(int sig, void (*handler)(int))
{
    struct sigaction now;
    if (sigaction(sig, NULL, &now) == 0 && now.sa_handler != SIG_IGN)
        sigaction(sig, &(struct sigaction){ .sa_handler = handler, .sa_flags = SA_RESTART }, NULL);
}

static fb_status with_job(const words *w, fb_status (*act)(fb_job *j, const words *w, fb_error *err), fb_error *err)
{
    fb_job *j;
    fb_status st = fb_job_open(&j, w->positional[0], w->overrides, w->n_override, &terminal, err);
    if (st != FB_OK)
        return st;
    st = act(j, w, err);
    fb_job_close(j);
    return st;
}

static fb_status act_train(fb_job *j, const words *w, fb_error *err)
{
    (void)w;
    running = j;
    for (int i = 0; i < N_ENDING; i++)
        handle(ending[i], on_ending);
    handle(SIGQUIT, on_quit);
    /* A reader of our output that dies takes no training with it, and a file too long is a sentence. */
    handle(SIGPIPE, SIG_IGN);
    handle(SIGXFSZ, SIG_IGN);
    fb_status st = fb_train(j, err);
    for (int i = 0; i < N_ENDING; i++)
        handle(ending[i], SIG_DFL);
    handle(SIGQUIT, SIG_DFL);
    running = NULL;
    return st;
}

static fb_status act_eval(fb_job *j, const words *w, fb_error *err)
{
    double loss;
    uint64_t n;
    (void)w;
    return fb_eval(j, &loss, &n, err);
}

static fb_status act_data(fb_job *j, const words *w, fb_error *err)
{
    return fb_data(j, w->preview, err);
}

static fb_status act_plan(fb_job *j, const words *w, fb_error *err)
{
    fb_plan_view v = w->plan;
    v.json = w->json;
    return fb_plan_report(j, &v, err);
}

static fb_status run_train(const words *w, fb_error *err) { return with_job(w, act_train, err); }
static fb_status run_eval(const words *w, fb_error *err) { return with_job(w, act_eval, err); }
static fb_status run_data(const words *w, fb_error *err) { return with_job(w, act_data, err); }
static fb_status run_plan(const words *w, fb_error *err) { return with_job(w, act_plan, err); }

static fb_status run_inspect(const words *w, fb_error *err)
{
    return fb_inspect(w->positional[0], w->json, &terminal, err);
}

static fb_status run_generate(const words *w, fb_error *err)
{
    return fb_generate(w->positional[0], w->positional[1], w->overrides, w->n_override, &terminal, err);
}

static fb_status run_bench(const words *w, fb_error *err)
{
    return fb_bench(&(fb_bench_request){ .preset = w->preset, .model_dir = w->model, .n_step = w->steps, .json = w->json,
                                         .alias_host = w->alias_host,
                                         .overrides = w->overrides, .n_override = w->n_override }, &terminal, err);
}

static fb_status run_probe(const words *w, fb_error *err)
{
    return fb_probe(&(fb_probe_request){ .out = w->out, .disk_dir = w->disk, .overrides = w->overrides, .n_override = w->n_override,
                                         .sink = &terminal }, err);
}

static fb_status run_export(const words *w, fb_error *err)
{
    const char *dtype = NULL;
    for (int i = 0; i < w->n_override; i++) {
        if (strncmp(w->overrides[i], "save_dtype=", 11))
            return usage(err, "export takes only save_dtype, not", w->overrides[i], "export CHECKPOINT DIR [save_dtype=...]");
        dtype = w->overrides[i] + 11;
    }
    return fb_export(w->positional[0], w->positional[1], dtype, &terminal, err);
}

static fb_status run_doctor(const words *w, fb_error *err)
{
    if (w->n_override)
        return usage(err, "doctor takes no settings", "", "doctor");
    return fb_doctor(&terminal, err);
}

static const struct command {
    const char *name, *form, *help;
    int  n_positional;
    unsigned takes;
    fb_status (*run)(const words *w, fb_error *err);
} commands[] = {
    { "train", "train CONFIG.yaml [key=value ...]",
      "fine-tune or pre-train; the model ends in output_dir", 1, 0, run_train },
    { "data", "data CONFIG.yaml [--preview N] [key=value ...]",
      "make the token shards, or show what would be learned", 1, TAKES_PREVIEW, run_data },
    { "plan", "plan CONFIG.yaml | --preset NAME[:LAYERS] [--machine NAME|FILE] [--hbm SIZE] [--ram SIZE] [--link GB/S] [--json] "
              "[--html FILE] [key=value ...]",
      "bytes and time of a run, here or elsewhere, before anything is allocated", 1, TAKES_JSON | TAKES_PLAN, run_plan },
    { "inspect", "inspect MODEL_DIR [--json]",
      "a checkpoint's tensors, roles and blocks", 1, TAKES_JSON, run_inspect },
    { "eval", "eval CONFIG.yaml [key=value ...]",
      "the loss on the held-out rows", 1, 0, run_eval },
    { "generate", "generate MODEL_DIR \"prompt\" [key=value ...]",
      "continue a prompt", 2, 0, run_generate },
    { "bench", "bench --preset NAME[:LAYERS] | --model DIR [--steps N] [--json] [--trace FILE] [--alias-host-memory] "
               "[key=value ...]",
      "real steps on random rows: speed, and where the time goes", 0, TAKES_JSON | TAKES_BENCH, run_bench },
    { "probe", "probe [--out FILE] [--disk DIR] [key=value ...]",
      "measure this machine, and write its profile to plan with", 0, TAKES_PROBE, run_probe },
    { "export", "export CHECKPOINT DIR [save_dtype=...]",
      "a checkpoint as a plain Hugging Face folder", 2, 0, run_export },
    { "doctor", "doctor",
      "what this machine and installation can do", 0, 0, run_doctor },
};
enum { N_COMMAND = sizeof commands / sizeof *commands };

static int help(FILE *out)
{
    fprintf(out, "forebay %s: trains language models larger than the device's memory\n\n", fb_version());
    for (int i = 0; i < N_COMMAND; i++)
        fprintf(out, "  forebay %-52s %s\n", commands[i].form, commands[i].help);
    fprintf(out, "  forebay %-52s %s\n", "help config", "every config key");
    fprintf(out, "\nexit codes: 0 done, 1 failure, 2 usage or config, 3 bad model or data file, 4 does not fit, 5 not finite, "
                 "75 stopped by a signal, what was learned is saved\n");
    return out == stdout ? 0 : 2;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return help(stderr);
    fb_bus_error_catch();
    const char *name = argv[1];
    if (!strcmp(name, "help") || !strcmp(name, "--help") || !strcmp(name, "-h")) {
        if (argc > 2 && !strcmp(argv[2], "config")) {
            fb_config_help(&terminal);
            return 0;
        }
        return help(stdout);
    }
    if (!strcmp(name, "--version") || !strcmp(name, "version")) {
        printf("forebay %s\n", fb_version());
        return 0;
    }
    for (int i = 0; i < N_COMMAND; i++) {
        const struct command *c = &commands[i];
        fb_error err = { 0 };
        words w;
        if (strcmp(name, c->name))
            continue;
        fb_status st = read_words(&w, argc - 2, argv + 2, c->n_positional, c->takes, c->form, &err);
        return ended(st == FB_OK ? c->run(&w, &err) : st, &err);
    }
    fprintf(stderr, "forebay: '%s' is no command; the commands are", name);
    for (int i = 0; i < N_COMMAND; i++)
        fprintf(stderr, "%s %s", i ? "," : "", commands[i].name);
    fprintf(stderr, "; see forebay help\n");
    return 2;
}
