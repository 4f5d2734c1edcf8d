#include "plan/search.h"

#include <assert.h>

enum { CUTS_MAX = 64, ROUNDS_MAX = 100, HOME_POINTS = 4 };
/* Steps closer than this are equal: the one with less memory is taken. */
static const double SAME = 1e-6;

typedef struct candidate {
    fb_layout layout;
    uint32_t  micro_rows;
    double    seconds;
    uint64_t  bytes;    /* on both sides */
} candidate;

typedef struct seeker {
    fb_plan_request   r;      /* for the micro-batch in hand */
    fb_costs          costs;  /* the same */
    const fb_machine *m;
    const fb_wishes  *w;
    fb_search_effort  effort;
    bool              only_fits; /* is all that is asked */
    bool              coarse;    /* the neighbours of what is found will be looked at */
    bool              roomy;     /* what fits must leave room for the largest gradient, so that it leaves in one piece */
    uint32_t          cuts[CUTS_MAX], n_cut; /* rows of a micro-batch that are tried, rising */
    bool              found, any; /* a layout that fits: at all; since this was last set to false */
    candidate         best;
    bool              missed; /* a layout that does not fit has been seen; the one that is least short: */
    candidate         least;
    uint64_t          least_short;
} seeker;

static uint32_t n_layer(const seeker *s)
{
    return s->r.manifest->cfg.n_layer;
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* ---- the cut into micro-batches ---- */

static uint32_t cut_of(const fb_wishes *w, uint32_t rows)
{
    return (w->load.rows_per_step + rows - 1) / rows;
}

static void take_cut(seeker *s, uint32_t rows)
{
    if (s->r.micro_rows == rows && s->costs.machine)
        return;
    s->r.micro_rows = rows;
    s->r.n_micro = cut_of(s->w, rows);
    s->costs = fb_costs_of(&s->r, s->m, &s->w->load);
}

/* The fewest rows for each number of micro-batches: more would only make the last one smaller.  Where there are too many, every
 * so many are left out, but never the smallest and the preferred one. */
static void list_cuts(seeker *s, uint32_t preferred)
{
    uint32_t rows = s->w->load.rows_per_step, n = 0;
    for (uint32_t at = 1; at <= rows; at++)
        n += at == preferred || cut_of(s->w, at) != cut_of(s->w, at - (at > 1)) || at == 1;
    uint32_t stride = n / (CUTS_MAX - 2) + 1, i = 0;
    s->n_cut = 0;
    for (uint32_t at = 1; at <= rows; at++) {
        if (at != preferred && at != 1 && cut_of(s->w, at) == cut_of(s->w, at - 1))
            continue;
        fb_error unused;
        fb_plan_request r = s->r;
        r.micro_rows = at, r.n_micro = cut_of(s->w, at);
        if ((at == preferred || i % stride == 0) && fb_plan_check(&r, &unused) == FB_OK)
            s->cuts[s->n_cut++] = at;
        i++;
    }
}

/* ---- one layout ---- */

/* Device memory is not to be had in larger pieces, host memory is: what one side lacks is rather said of the host. */
static uint64_t shortfall(const fb_plan *p, const fb_plan_request *r)
{
    return 2 * fb_plan_device_short(p, r) + fb_plan_host_short(p, r);
}

static bool lay_out(seeker *s, fb_plan *p, const fb_layout *l)
{
    s->effort.n_laid_out++;
    fb_plan_request r = s->r;
    r.hbm_budget = s->roomy ? 0 : r.hbm_budget; /* without a budget the buffer is as large as is of use */
    fb_plan_lay_out(p, &r, l);
    if (fb_plan_fits(p, &s->r))
        return s->any = true;
    if (s->roomy)
        return false;
    uint64_t is_short = shortfall(p, &s->r);
    if (!s->missed || is_short < s->least_short) {
        s->missed = true;
        s->least_short = is_short;
        s->least = (candidate){ .layout = p->layout, .micro_rows = s->r.micro_rows };
    }
    return false;
}

static bool fits(seeker *s, const fb_layout *l)
{
    fb_plan p;
    return lay_out(s, &p, l);
}

static bool fits_host(seeker *s, const fb_layout *l)
{
    fb_plan p;
    lay_out(s, &p, l);
    return !fb_plan_host_short(&p, &s->r);
}

static bool fits_device(seeker *s, const fb_layout *l)
{
    fb_plan p;
    lay_out(s, &p, l);
    return !fb_plan_device_short(&p, &s->r);
}

static bool is_better(const candidate *a, const candidate *b)
{
    double d = a->seconds - b->seconds, same = SAME * b->seconds;
    return d < -same || (d <= same && a->bytes < b->bytes);
}

/* Takes the layout if it fits and is better than the best so far. */
static bool consider(seeker *s, const fb_layout *l)
{
    fb_plan p;
    fb_timeline t = { 0 };
    if (!lay_out(s, &p, l))
        return false;
    if (s->only_fits)
        return s->found = true;
    candidate c = { .layout = p.layout, .micro_rows = s->r.micro_rows, .bytes = p.device_bytes + p.host_bytes };
    c.seconds = fb_simulate_bound(&p, s->r.manifest, &s->costs) * (1 - 1e-9);
    if (s->found && !is_better(&c, &s->best))
        return false;
    s->effort.n_simulated++;
    fb_simulate(&t, &p, s->r.manifest, &s->costs);
    c.seconds = t.seconds;
    if (s->found && !is_better(&c, &s->best))
        return false;
    s->best = c;
    s->found = true;
    return true;
}

/* ---- filling what is left ---- */

/* Bytes over the budget that is exceeded by more, or (negative) below the one that is nearer. */
static double excess(const fb_plan *p, const fb_plan_request *r)
{
    double taken = (double)p->host_bytes + (r->unified ? (double)p->device_bytes : 0);
    double device = r->hbm_budget ? (double)p->device_bytes - (double)r->hbm_budget : -1e30;
    double host = r->ram_budget ? taken - (double)r->ram_budget : -1e30;
    return device > host ? device : host;
}

/* The largest value of *field in [low, high] with which the layout fits, taking for granted that less needs less.  Needs are nearly
 * linear in what grows here, so the guess is between by proportion, then on either side of where that led. */
static bool grow(seeker *s, fb_layout *l, uint32_t *field, uint32_t low, uint32_t high)
{
    fb_plan p;
    *field = low;
    if (low > high || !lay_out(s, &p, l))
        return false;
    double at_low = excess(&p, &s->r), at_high;
    *field = high;
    if (low == high || lay_out(s, &p, l))
        return true;
    at_high = excess(&p, &s->r);
    for (bool middle = false; high - low > 1; middle = !middle) { /* low fits, high does not */
        double share = at_low < 0 && at_high > at_low ? -at_low / (at_high - at_low) : 0.5;
        uint32_t guess = middle ? low + (high - low) / 2 : low + (uint32_t)(share * (high - low) + 1e-9);
        guess = guess <= low ? low + 1 : guess >= high ? high - 1 : guess;
        *field = guess;
        bool fitting = lay_out(s, &p, l);
        double e = excess(&p, &s->r);
        if (fitting)
            low = guess, at_low = e;
        else
            high = guess, at_high = e;
    }
    *field = low;
    return true;
}

static bool fill_slots(seeker *s, fb_layout *l)
{
    uint32_t streamed = n_layer(s) - min_u32(l->home_layers, n_layer(s));
    if (s->w->slots != FB_AUTO) {
        l->slots = s->w->slots;
        return fits(s, l);
    }
    return grow(s, l, &l->slots, min_u32(2, streamed), streamed) || grow(s, l, &l->slots, min_u32(1, streamed), streamed);
}

static bool fill(seeker *s, fb_layout *l)
{
    uint32_t fewest = min_u32(2, n_layer(s) - min_u32(l->home_layers, n_layer(s)));
    l->slots = s->w->slots != FB_AUTO ? s->w->slots : fewest;
    if (l->rich < l->recompute)
        grow(s, l, &l->n_rich, 0, n_layer(s));
    return fill_slots(s, l);
}

/* With and without room for the largest gradient: either may be the faster.  At first the one that is so more often will do. */
static void consider_filled(seeker *s, const fb_layout *l)
{
    bool fitting = false;
    for (int roomy = 1; roomy >= 0 && !(fitting && s->coarse); roomy--) {
        fb_layout filled = *l;
        s->roomy = roomy;
        fitting = fill(s, &filled);
        s->roomy = false;
        if (fitting)
            consider(s, &filled);
    }
}

/* ---- what is free to choose ---- */

static void place(const seeker *s, fb_layout *l, bool embed, bool head)
{
    const fb_wishes *w = s->w;
    bool all = w->placement == FB_HOME_EVERYTHING, tied = s->r.manifest->cfg.tied;
    if (w->placement != FB_HOME_AUTO) {
        embed = all || (w->placement == FB_HOME_LAYERS && w->home_layers && !tied);
        head = all;
    }
    if (tied)
        embed = head = embed || head;
    l->home_embed = embed;
    l->home_head = head;
    if (w->placement != FB_HOME_AUTO)
        l->home_layers = all ? n_layer(s) : w->placement == FB_HOME_LAYERS ? min_u32(w->home_layers, n_layer(s)) : 0;
}

/* Of all layers but the last ones, and of these.  Where what is kept travels, the last layers' comes back first: they may keep
 * less. */
static const fb_recompute pairs[][2] = {
    { FB_RECOMPUTE_FULL, FB_RECOMPUTE_NONE },      { FB_RECOMPUTE_SELECTIVE, FB_RECOMPUTE_NONE },
    { FB_RECOMPUTE_FULL, FB_RECOMPUTE_SELECTIVE }, { FB_RECOMPUTE_FULL, FB_RECOMPUTE_FULL },
    { FB_RECOMPUTE_SELECTIVE, FB_RECOMPUTE_SELECTIVE }, { FB_RECOMPUTE_NONE, FB_RECOMPUTE_NONE },
    { FB_RECOMPUTE_SELECTIVE, FB_RECOMPUTE_FULL }, { FB_RECOMPUTE_NONE, FB_RECOMPUTE_FULL },
    { FB_RECOMPUTE_NONE, FB_RECOMPUTE_SELECTIVE },
};
enum { N_PAIR = FB_COUNT(pairs) };

static bool may_pair(const seeker *s, size_t i, bool on_host)
{
    if (s->w->recompute != FB_WISH_AUTO)
        return pairs[i][0] == pairs[i][1] && pairs[i][0] == (fb_recompute)s->w->recompute;
    return on_host || pairs[i][0] >= pairs[i][1];
}

static bool may_host(const seeker *s, int on_host)
{
    return s->w->kept_on_host == FB_WISH_AUTO ? !(on_host && s->r.unified && s->found) : s->w->kept_on_host == on_host;
}

static bool may_acc(const seeker *s, bool on_device)
{
    return s->w->acc_on_device == FB_WISH_AUTO || s->w->acc_on_device == on_device;
}

/* Passes 1.. that differ, as the numbers of micro-batches in each. */
static uint32_t next_pass(const seeker *s, uint32_t n_pass)
{
    uint32_t k = (s->r.n_micro + n_pass - 1) / n_pass;
    return k <= 1 ? UINT32_MAX : (s->r.n_micro + k - 2) / (k - 1);
}

/* What even the most that the pair can keep, with so many layers at home, must compute and move.  Updates on the device are part of
 * the bound with that many, but fewer layers have fewer: hence the margin. */
static bool is_hopeless(seeker *s, fb_layout l, uint32_t home)
{
    static const double margin = 0.98;
    fb_plan p;
    if (!s->found)
        return false;
    l.n_rich = l.rich < l.recompute ? n_layer(s) : 0;
    l.home_layers = home;
    l.slots = n_layer(s);
    s->effort.n_laid_out++;
    fb_plan_lay_out(&p, &s->r, &l);
    return margin * fb_simulate_bound(&p, s->r.manifest, &s->costs) >= s->best.seconds;
}

/* The fewest layers at home, at least low, that leave the host enough: it needs less with each. */
static uint32_t fewest_for_host(seeker *s, fb_layout l, uint32_t low)
{
    for (uint32_t high = n_layer(s); low < high;) {
        l.home_layers = low + (high - low) / 2;
        if (fits_host(s, &l))
            high = l.home_layers;
        else
            low = l.home_layers + 1;
    }
    return low;
}

/* Numbers of layers at home, from the fewest that host memory allows to the most that the device does. */
static void try_homes(seeker *s, fb_layout l)
{
    if (s->w->placement != FB_HOME_AUTO) {
        consider_filled(s, &l);
        return;
    }
    fb_layout least = l;
    least.n_rich = 0;
    least.slots = s->w->slots != FB_AUTO ? s->w->slots : 1;
    uint32_t low = fewest_for_host(s, least, 0), high;
    least.home_layers = low;
    if (!fits(s, &least)) { /* with everything at home there are no slots */
        least.home_layers = n_layer(s);
        low = n_layer(s);
    }
    if (!grow(s, &least, &least.home_layers, low, n_layer(s)))
        return;
    high = least.home_layers;
    if (is_hopeless(s, l, high))
        return;
    for (uint32_t i = 0; i < HOME_POINTS; i++) {
        uint32_t h = low + (uint32_t)((uint64_t)(high - low) * i / (HOME_POINTS - 1));
        if (i && h == l.home_layers)
            continue;
        l.home_layers = h;
        consider_filled(s, &l);
    }
    l.home_layers = n_layer(s); /* needs no slots nor buffers for gradients to leave from, so it may fit where one less does not */
    if (high < n_layer(s))
        consider_filled(s, &l);
}

static void try_pass(seeker *s, uint32_t n_pass)
{
    for (int on_host = 0; on_host < 2; on_host++) {
        if (!may_host(s, on_host))
            continue;
        for (size_t i = 0; i < N_PAIR; i++) {
            /* A pair covers its members, unless keeping costs what the link carries. */
            bool single = pairs[i][0] == pairs[i][1] && s->w->recompute == FB_WISH_AUTO;
            if (!may_pair(s, i, on_host) || (single && !on_host && n_layer(s) > 1))
                continue;
            for (int home = 0; home < 2; home++) {
                fb_layout l = { .n_pass = n_pass, .recompute = pairs[i][0], .rich = pairs[i][1], .kept_on_host = on_host,
                                .acc_on_device = n_pass > 1 && may_acc(s, true) };
                if (home && s->w->placement != FB_HOME_AUTO)
                    continue;
                place(s, &l, home, home);
                if (is_hopeless(s, l, n_layer(s)))
                    continue;
                bool before = s->any;
                s->any = false;
                try_homes(s, l);
                bool other = l.acc_on_device && may_acc(s, false);
                l.acc_on_device = false; /* the neighbours of the best will tell whether it is better where both fit */
                if (other && !s->any)
                    try_homes(s, l);
                s->any = s->any || before;
            }
        }
    }
}

/* The fewest passes that fit, one more, and then ever more: where most is at home, passes cost little and save what is kept. */
static void try_cut(seeker *s, uint32_t rows)
{
    take_cut(s, rows);
    if (s->w->n_pass != FB_AUTO) {
        try_pass(s, s->w->n_pass);
        return;
    }
    uint32_t n_fitting = 0, most = s->r.n_micro;
    for (uint32_t n_pass = 1; n_pass <= most; ) {
        s->any = false;
        try_pass(s, n_pass);
        n_fitting += s->any;
        uint32_t next = next_pass(s, n_pass);
        for (uint32_t at = next; n_fitting > 1 && at < 2 * n_pass && at <= most; at = next_pass(s, at))
            next = at;
        n_pass = n_pass < most && next > most ? most : next;
    }
}

/* Whatever needs least, all ways: if none of these fits, nothing does.  Of several passes, one for each micro-batch needs least.  A
 * layer more at home is more on the device and less on the host, but for the window that the first one brings. */
static void try_thriftiest(seeker *s)
{
    fb_recompute policy = s->w->recompute == FB_WISH_AUTO ? FB_RECOMPUTE_FULL : (fb_recompute)s->w->recompute;
    uint32_t slots = s->w->slots != FB_AUTO ? s->w->slots : 1;
    for (int many = 0; many < 2; many++)
        for (int bits = 0; bits < 16 && !(s->only_fits && s->found); bits++) {
            bool on_host = bits & 1, acc = bits & 2;
            fb_layout l = { .n_pass = s->w->n_pass != FB_AUTO ? s->w->n_pass : many ? s->r.n_micro : 1, .slots = slots,
                            .recompute = policy, .rich = policy, .kept_on_host = on_host, .acc_on_device = acc };
            place(s, &l, bits & 4, bits & 8);
            if ((s->w->kept_on_host != FB_WISH_AUTO && s->w->kept_on_host != on_host) || (l.n_pass == 1 ? acc : !may_acc(s, acc)))
                continue;
            consider(s, &l);
            if (s->w->placement != FB_HOME_AUTO)
                continue;
            uint32_t low = 0, high = n_layer(s);
            while (low < high) { /* the most that the device holds */
                l.home_layers = high - (high - low) / 2;
                if (fits_device(s, &l))
                    low = l.home_layers;
                else
                    high = l.home_layers - 1;
            }
            l.home_layers = low;
            consider(s, &l);
            l.home_layers = fewest_for_host(s, l, min_u32(1, n_layer(s)));
            consider(s, &l);
        }
}

/* The same for the cuts that can be the thriftiest. */
static void try_ends(seeker *s, uint32_t preferred)
{
    uint32_t ends[] = { s->cuts[0], preferred, s->cuts[s->n_cut - 1] };
    for (size_t i = 0; i < FB_COUNT(ends); i++)
        if (s->w->micro_rows == FB_AUTO || i == 1) {
            take_cut(s, ends[i]);
            try_thriftiest(s);
        }
}

/* ---- neighbours ---- */

/* What is fixed, a layout that was cut down for another micro-batch gets again. */
static void obey(const seeker *s, fb_layout *l)
{
    place(s, l, l->home_embed, l->home_head);
    l->n_pass = s->w->n_pass != FB_AUTO ? s->w->n_pass : l->n_pass;
    if (s->w->acc_on_device != FB_WISH_AUTO)
        l->acc_on_device = s->w->acc_on_device;
}

static void try_filled(seeker *s, fb_layout l)
{
    obey(s, &l);
    l.slots = s->w->slots != FB_AUTO ? s->w->slots : max_u32(l.slots, 1); /* there are none where everything is at home */
    consider(s, &l);
    fb_layout more = l;
    if (fill_slots(s, &more))
        consider(s, &more);
    consider_filled(s, &l);
}

static uint32_t moved(uint32_t x, int by, uint32_t most)
{
    return by < 0 ? x - min_u32(x, (uint32_t)-by) : min_u32(x + (uint32_t)by, most);
}

static void try_neighbours(seeker *s)
{
    static const int steps[] = { -8, -4, -2, -1, 1, 2, 4, 8 };
    candidate c = s->best;
    take_cut(s, c.micro_rows);
    for (size_t i = 0; i < FB_COUNT(steps); i++) {
        fb_layout l = c.layout;
        l.home_layers = moved(l.home_layers, steps[i], n_layer(s));
        try_filled(s, l);
        l = c.layout;
        l.n_rich = moved(l.n_rich, steps[i], n_layer(s));
        if (l.rich != l.recompute)
            try_filled(s, l);
        l = c.layout;
        l.slots = max_u32(moved(l.slots, steps[i], n_layer(s)), 1);
        if (s->w->slots == FB_AUTO)
            consider(s, &l);
    }
    for (int bits = 0; bits < 4; bits++) {
        fb_layout l = c.layout;
        l.home_embed = bits & 1, l.home_head = bits & 2;
        try_filled(s, l);
    }
    for (size_t i = 0; i < N_PAIR; i++) {
        fb_layout l = c.layout;
        l.recompute = pairs[i][0], l.rich = pairs[i][1];
        if (!may_pair(s, i, l.kept_on_host))
            continue;
        try_filled(s, l);
        for (l.n_rich = 1; l.recompute < l.rich && l.n_rich <= 4; l.n_rich *= 2)
            try_filled(s, l);
    }
    fb_layout l = c.layout; /* the other layers first: what takes longer then comes earlier or later */
    l.recompute = c.layout.rich, l.rich = c.layout.recompute, l.n_rich = n_layer(s) - l.n_rich;
    if (l.recompute != l.rich)
        try_filled(s, l);
    l = c.layout;
    l.acc_on_device = !l.acc_on_device;
    if (may_acc(s, l.acc_on_device))
        try_filled(s, l);
    l = c.layout;
    l.kept_on_host = !l.kept_on_host;
    if (s->w->kept_on_host == FB_WISH_AUTO)
        try_filled(s, l);
    for (int by = -1; by < 2 && s->w->n_pass == FB_AUTO; by += 2) {
        l = c.layout;
        l.n_pass = max_u32(moved(l.n_pass, by, s->r.n_micro), 1);
        try_filled(s, l);
        try_homes(s, l);
    }
    for (uint32_t i = 0; i < s->n_cut && s->w->micro_rows == FB_AUTO && !s->r.unified; i++)
        if ((i && s->cuts[i - 1] == c.micro_rows) || (i + 1 < s->n_cut && s->cuts[i + 1] == c.micro_rows)
            || s->cuts[i] == 2 * c.micro_rows || 2 * s->cuts[i] == c.micro_rows) {
            take_cut(s, s->cuts[i]);
            try_filled(s, c.layout);
            l = c.layout;
            obey(s, &l);
            try_homes(s, l);
            l.n_pass = s->w->n_pass != FB_AUTO ? s->w->n_pass : s->r.n_micro;
            try_homes(s, l);
        }
}

/* Slots that save no time are given back. */
static void give_back(seeker *s)
{
    take_cut(s, s->best.micro_rows);
    for (uint32_t step = s->best.layout.slots / 2; step && s->w->slots == FB_AUTO; step /= 2)
        for (;;) {
            fb_layout l = s->best.layout;
            l.slots -= min_u32(step, l.slots - min_u32(l.slots, 1));
            if (l.slots == s->best.layout.slots || !consider(s, &l))
                break;
        }
}

/* ---- the search ---- */

static void search(seeker *s, uint32_t preferred)
{
    const fb_wishes *w = s->w;
    s->coarse = true;
    if (w->known_rows) {
        take_cut(s, w->known_rows);
        consider(s, &w->known);
    }
    try_cut(s, preferred);
    uint32_t last = UINT32_MAX; /* of cuts that are nearly the same one is enough: the best's neighbours come later */
    /* on the cpu another cut would buy nothing */
    for (uint32_t i = s->n_cut; i-- > 0 && w->micro_rows == FB_AUTO && !s->r.unified;)
        if (i == 0 || s->cuts[i] < last - last / 4) {
            try_cut(s, s->cuts[i]);
            last = s->cuts[i];
        }
    for (uint32_t i = s->n_cut; i-- > 0 && !s->found && w->micro_rows == FB_AUTO && s->r.unified;)
        if (s->cuts[i] < preferred)
            try_cut(s, s->cuts[i]);
    if (!s->found)
        try_ends(s, preferred);
    s->coarse = false;
    for (uint32_t round = 0; s->found && round < ROUNDS_MAX; round++) {
        candidate was = s->best;
        try_neighbours(s);
        if (!is_better(&s->best, &was))
            break;
    }
    if (s->found)
        give_back(s);
}

static fb_status begin(seeker *s, fb_plan_request *r, const fb_machine *m, const fb_wishes *w, uint32_t *preferred, fb_error *err)
{
    uint32_t rows = w->load.rows_per_step;
    assert(r->train && rows);
    *s = (seeker){ .r = *r, .m = m, .w = w };
    *preferred = max_u32(min_u32(w->micro_rows != FB_AUTO ? w->micro_rows : r->micro_rows, rows), 1);
    r->micro_rows = *preferred, r->n_micro = cut_of(w, *preferred);
    list_cuts(s, *preferred);
    s->r.micro_rows = 0; /* no cut is in hand */
    fb_status st = fb_plan_check(r, err);
    if (st == FB_OK || s->n_cut == 0 || w->micro_rows != FB_AUTO)
        return st;
    *preferred = s->cuts[s->n_cut - 1];
    return FB_OK;
}

fb_status fb_plan_search(fb_plan *out, fb_timeline *t, fb_plan_request *r, const fb_machine *m, const fb_wishes *w,
                         fb_search_effort *effort, fb_error *err)
{
    seeker s;
    uint32_t preferred;
    fb_status st = begin(&s, r, m, w, &preferred, err);
    if (st != FB_OK)
        return st;
    search(&s, preferred);
    candidate *c = s.found ? &s.best : &s.least;
    if (c->layout.n_rich == n_layer(&s)) /* the same, in fewer words */
        c->layout.recompute = c->layout.rich, c->layout.n_rich = 0;
    take_cut(&s, c->micro_rows);
    r->micro_rows = s.r.micro_rows, r->n_micro = s.r.n_micro;
    fb_plan_lay_out(out, r, &c->layout);
    if (effort)
        *effort = s.effort;
    if (t)
        fb_simulate(t, out, r->manifest, &s.costs);
    return fb_plan_refuse(out, r, err);
}

bool fb_plan_can_fit(const fb_plan_request *r, const fb_machine *m, const fb_wishes *w)
{
    seeker s;
    uint32_t preferred;
    fb_error unused;
    fb_plan_request asked = *r;
    if (begin(&s, &asked, m, w, &preferred, &unused) != FB_OK)
        return false;
    s.only_fits = true;
    try_ends(&s, preferred);
    return s.found;
}
