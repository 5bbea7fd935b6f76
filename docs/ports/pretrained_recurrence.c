// Adding recurrence to pretrained Transformers in plain C: GPT-2 that reads windows, and a vector carried between them.
//
//   cc -O1 -std=c11 -o pretrained_recurrence pretrained_recurrence.c -lm
//   ./pretrained_recurrence IN.safetensors OUT.safetensors
//
// Reads given/ (parameters, state, tokens), computes a rollout of all segments, its gradient, and steps of SGD and
// AdamW, and writes them under the names of the vectors. Written from docs/porting.md and the chapter alone.
// Lanes never meet, so all functions are for one lane. A backward function adds to its parameters' gradients and
// returns that of its input, in new memory. Memory is kept until the end: it is little.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define MAX_LAYERS 64
#define fail(...) (fprintf(stderr, "pretrained_recurrence: " __VA_ARGS__), fputc('\n', stderr), exit(2))
static void *zeros(long n, size_t size) { // one more than n: a string's end
    void *data = calloc(n + 1, size);
    return data ? data : (fail("out of memory"), NULL);
}
static double *numbers(long n) { return zeros(n, sizeof(double)); }

static char *text(const char *format, ...) {
    char *buffer = zeros(200, 1);
    va_list args;
    va_start(args, format), vsnprintf(buffer, 200, format, args), va_end(args);
    return buffer;
}

// ---- Tensors: one list, found by name -------------------------------------------------------------------------------
typedef struct {
    char name[100];
    int bytes, dims; // bytes of a number in a file: 8, or 1 of BOOL. Here all are doubles
    long shape[4], size;
    double *data, *grad, *mean, *square; // the last three are of parameters: the gradient, and what AdamW remembers
} Tensor;
static Tensor *tensors;
static int tensor_count;

static double *add_tensor(const char *name, int bytes, int dims, const long *shape) {
    if (!(tensors = realloc(tensors, (tensor_count + 1) * sizeof(Tensor)))) fail("out of memory");
    Tensor *t = &tensors[tensor_count++];
    *t = (Tensor){.bytes = bytes, .dims = dims, .size = 1};
    snprintf(t->name, sizeof t->name, "%s", name);
    for (int i = 0; i < dims; i++) t->size *= t->shape[i] = shape[i];
    t->grad = numbers(t->size), t->mean = numbers(t->size), t->square = numbers(t->size);
    return t->data = numbers(t->size);
}
static Tensor *look_up(const char *name) { // NULL if there is none
    for (int i = 0; i < tensor_count; i++)
        if (!strcmp(tensors[i].name, name)) return &tensors[i];
    return NULL;
}
static Tensor *find(const char *name, long size) { // one that must be there
    Tensor *t = look_up(name);
    if (!t) fail("there is no tensor %s", name);
    if (t->size != size) fail("%s has %ld numbers and not %ld", name, t->size, size);
    return t;
}

// ---- The file: 8 bytes, JSON, numbers. The machine has to be little-endian, with a long of 64 bits ------------------
static char *header; // without backslashes: then config and steps, JSON in strings, are read like the rest
static char *after(char *from, const char *key) { // what stands after "key":
    const char *quoted = text("\"%s\"", key), *blank = " \t\r\n\"";
    while ((from = strstr(from, quoted))) {
        from += strlen(quoted) + strspn(from + strlen(quoted), blank);
        if (*from == ':') return from + 1 + strspn(from + 1, blank);
    }
    return fail("the header has no %s", quoted), NULL;
}
static int list(char *at, long *out, int most) { // [1, 2, 3]; returns how many
    int n = 0;
    for (at += *at == '['; *(at += strspn(at, " \t\r\n,")) != ']'; n++) {
        char *start = at;
        if (n < most) out[n] = strtol(start, &at, 10);
        if (at == start || out[n] < 0) fail("the header has a bad list: %.20s", start);
    }
    return n;
}
static void read_tensor(const char *name, char *object, const char *block, long block_size) {
    char *dtype = after(object, "dtype");
    int is_bool = !strncmp(dtype, "BOOL\"", 5), is_integer = !strncmp(dtype, "I64\"", 4), bytes = is_bool ? 1 : 8;
    if (!is_bool && !is_integer && strncmp(dtype, "F64\"", 4)) fail("%s is neither F64, I64 nor BOOL", name);
    long shape[4], place[2], integer, dims = list(after(object, "shape"), shape, 4);
    double size = bytes; // in the file
    for (int i = 0; i < dims; i++) size *= shape[i];
    if (list(after(object, "data_offsets"), place, 2) != 2 || place[1] > block_size || place[1] - place[0] != size)
        fail("%s: its shape does not fit its place in the file", name);
    double *data = add_tensor(name, bytes, dims, shape);
    for (const char *at = block + place[0]; at < block + place[1]; at += bytes, data++)
        if (is_bool) *data = *at;
        else if (is_integer) memcpy(&integer, at, 8), *data = integer;
        else memcpy(data, at, 8);
}
static void read_file(const char *path) { // of it, only what begins with given/: the rest is the answers
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) fail("cannot open %s", path);
    long size = ftell(file) - 8, n = 0;
    rewind(file);
    if (size < 2 || !fread(&n, 8, 1, file) || n < 2 || n > size) fail("%s is not a safetensors file", path);
    char *bytes = zeros(size, 1), *end, *object, *close;
    if (fread(bytes, 1, size, file) != (size_t)size || fclose(file)) fail("cannot read %s", path);
    char *to = header = zeros(n, 1);
    for (long i = 0; i < n; i++) to += (*to = bytes[i]) != '\\';
    *to = 0;
    for (char *at = header; (at = strstr(at, "\"given/")); at = close) {
        if (!(end = strchr(at + 1, '"')) || !(object = strchr(end, '{')) || !(close = strchr(object, '}')))
            fail("the header of %s is not JSON", path);
        *close = 0; // for the time of reading it
        read_tensor(text("%.*s", (int)(end - at - 1), at + 1), object, bytes + n, size - n);
        *close = '}';
    }
}

static void write_file(const char *path, int first) { // all tensors from this one on
    long n = 0, size = 0;
    for (Tensor *t = tensors + first; t < tensors + tensor_count; t++) size += t->size * t->bytes;
    char *out = zeros(tensor_count + 1, 300), *bytes = zeros(size, 1), *at = bytes;
    for (Tensor *t = tensors + first; t < tensors + tensor_count; t++) {
        n += sprintf(out + n, "%c\"%s\":{\"shape\":[", n ? ',' : '{', t->name);
        for (int i = 0; i < t->dims; i++) n += sprintf(out + n, i ? ",%ld" : "%ld", t->shape[i]);
        n += sprintf(out + n, "],\"dtype\":\"%s\",\"data_offsets\":[%ld,", t->bytes == 1 ? "BOOL" : "F64", at - bytes);
        for (long i = 0; i < t->size; i++, at += t->bytes)
            if (t->bytes == 1) *at = t->data[i] != 0;
            else memcpy(at, t->data + i, 8);
        n += sprintf(out + n, "%ld]}", at - bytes);
    }
    n += sprintf(out + n, "}");
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(&n, 8, 1, file) + fwrite(out, n, 1, file) + fwrite(bytes, size, 1, file) != 3 || fclose(file))
        fail("cannot write %s", path);
}

// ---- Sizes and parameters -------------------------------------------------------------------------------------------
static int V, D, L, H, E, F, S; // vocabulary, width, layers, heads and their width, feed_forward, vectors inserted
static int max_positions, overlap, module_layers, module_width, is_insertion[MAX_LAYERS];
static int pool_max, pool_attention, pool_advance, pool_final_norm; // booleans

static double number(const char *of, const char *name) { return strtod(after(after(header, of), name), NULL); }
static int is(const char *name, const char *value) { return !strncmp(after(header, name), value, strlen(value)); }
static void read_config(void) {
    long layers[MAX_LAYERS];
    V = number("config", "vocabulary"), D = number("config", "width"), L = number("config", "layers");
    H = number("config", "heads"), F = number("config", "feed_forward"), S = number("config", "vectors");
    max_positions = number("config", "max_positions"), overlap = number("config", "overlap");
    module_layers = number("config", "module_layers"), module_width = number("config", "module_width");
    pool_max = is("pooling", "max"), pool_attention = is("pooling", "attention");
    pool_advance = is("pool", "advance"), pool_final_norm = is("pool_final_norm", "true");
    if (fmin(fmin(V, D), fmin(fmin(H, F), fmin(L, module_width))) < 1 || fmin(S, fmin(overlap, module_layers)) < 0 ||
        fmax(L, module_layers) > MAX_LAYERS || D % H) fail("a size in the config is not possible");
    E = D / H;
    for (int n = list(after(header, "insertion_layers"), layers, MAX_LAYERS); n--;) // the config counts from 1
        if (layers[n] >= 1 && layers[n] <= L) is_insertion[layers[n] - 1] = S > 0;
        else fail("there is no layer %ld to insert at", layers[n]);
}
static Tensor *param(const char *name, long size) { return find(text("given/param/%s", name), size); }
static char *of(int l, const char *name) { return text("layers.%d.%s", l, name); }

// ---- The parts ------------------------------------------------------------------------------------------------------
static void add(double *to, double factor, const double *from, long n) {
    for (long i = 0; i < n; i++) to[i] += factor * from[i];
}
static double dot(const double *a, const double *b, long n) {
    double sum = 0;
    for (long i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// (rows, I) to (rows, O): in W^T + b with W (O, I). bias: whether there is one, and on the way back whether it learns
static double *linear_forward(const double *in, const char *name, int bias, int rows, int I, int O) {
    double *out = numbers(rows * O), *w = param(name, I * O)->data;
    double *b = bias ? param(text("%s_bias", name), O)->data : numbers(O);
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < O; o++) out[r * O + o] = dot(in + r * I, w + o * I, I) + b[o];
    return out;
}
static double *linear_backward(const double *dout, const double *in, const char *name, int bias, int rows,
                               int I, int O) {
    double *din = numbers(rows * I), *db = bias ? param(text("%s_bias", name), O)->grad : numbers(O);
    Tensor *w = param(name, I * O);
    for (int r = 0; r < rows; r++, in += I, dout += O) {
        for (int o = 0; o < O; o++) add(din + r * I, dout[o], w->data + o * I, I);
        for (int o = 0; o < O; o++) add(w->grad + o * I, dout[o], in, I);
        add(db, 1, dout, O);
    }
    return din;
}

static double normalize(double *n, const double *x) { // one row: n = (x - mean) / sigma; returns sigma
    double mean = 0, variance = 0;
    for (int d = 0; d < D; d++) mean += x[d] / D;
    for (int d = 0; d < D; d++) variance += (x[d] - mean) * (x[d] - mean) / D;
    for (int d = 0; d < D; d++) n[d] = (x[d] - mean) / sqrt(variance + 1e-5);
    return sqrt(variance + 1e-5);
}
static double *norm_forward(const double *in, const char *name, int rows) { // (rows, D)
    double *out = numbers(rows * D);
    double *scale = param(text("%s.scale", name), D)->data, *bias = param(text("%s.bias", name), D)->data;
    for (int r = 0; r < rows; r++) {
        normalize(out + r * D, in + r * D);
        for (int d = 0; d < D; d++) out[r * D + d] = scale[d] * out[r * D + d] + bias[d];
    }
    return out;
}
static double *norm_backward(const double *dout, const double *in, const char *name, int rows) {
    double *din = numbers(rows * D), *n = numbers(D), *dn = numbers(D);
    Tensor *scale = param(text("%s.scale", name), D), *bias = param(text("%s.bias", name), D);
    for (int r = 0; r < rows; r++, dout += D) {
        double sigma = normalize(n, in + r * D), mean = 0;
        for (int d = 0; d < D; d++) mean += (dn[d] = scale->data[d] * dout[d]) / D;
        for (int d = 0; d < D; d++) scale->grad[d] += n[d] * dout[d];
        add(bias->grad, 1, dout, D);
        double mean_n = dot(n, dn, D) / D;
        for (int d = 0; d < D; d++) din[r * D + d] = (dn[d] - mean - n[d] * mean_n) / sigma;
    }
    return din;
}

#define GELU_C 0.79788456080286535588 // sqrt(2 / pi)
static double *gelu_forward(const double *x, long n) { // by tanh, as GPT-2's
    double *out = numbers(n);
    for (long i = 0; i < n; i++) out[i] = x[i] / 2 * (1 + tanh(GELU_C * (x[i] + 0.044715 * x[i] * x[i] * x[i])));
    return out;
}
static double *gelu_backward(const double *dout, const double *in, long n) {
    double *din = numbers(n);
    for (long i = 0; i < n; i++) {
        double x = in[i], t = tanh(GELU_C * (x + 0.044715 * x * x * x));
        din[i] = dout[i] * ((1 + t) / 2 + x / 2 * (1 - t * t) * GELU_C * (1 + 3 * 0.044715 * x * x));
    }
    return din;
}

static void softmax_forward(double *out, const double *in, int n) {
    double largest = in[0], sum = 0;
    for (int i = 1; i < n; i++) largest = fmax(largest, in[i]);
    for (int i = 0; i < n; i++) sum += out[i] = exp(in[i] - largest);
    for (int i = 0; i < n; i++) out[i] /= sum;
}
static void softmax_backward(double *din, const double *dout, const double *out, int n) { // adds to din
    for (int i = 0; i < n; i++) din[i] += out[i] * (dout[i] - dot(out, dout, n));
}

// ---- A layer --------------------------------------------------------------------------------------------------------
typedef struct { // one layer's activations. N queries, K = slots + N keys: the inserted vectors', then the tokens'
    int N, K, slots, first; // first: the first key that is seen, = slots if no window came before
    double *source, *normed, *query, *key, *value, *weights, *attended, *after; // weights (H, N, K), others (.., D)
    double *mlp_normed, *before_gelu, *hidden, *output;                         // (N, D), (N, F), (N, F), (N, D)
} Run;
// Query i sees the keys first .. slots + i. Head h is the numbers h E .. (h + 1) E of a row
static void attention_forward(Run *a) {
    for (int h = 0; h < H; h++)
        for (int i = 0; i < a->N; i++) {
            int at = i * D + h * E, last = a->slots + i;
            double *w = a->weights + (h * a->N + i) * a->K;
            for (int j = a->first; j <= last; j++) w[j] = dot(a->query + at, a->key + j * D + h * E, E) / sqrt(E);
            softmax_forward(w + a->first, w + a->first, last + 1 - a->first);
            for (int j = a->first; j <= last; j++) add(a->attended + at, w[j], a->value + j * D + h * E, E);
        }
}
static void attention_backward(double *dquery, double *dkey, double *dvalue, const double *dout, const Run *a) {
    for (int h = 0; h < H; h++)
        for (int i = 0; i < a->N; i++) {
            int at = i * D + h * E, last = a->slots + i;
            double *w = a->weights + (h * a->N + i) * a->K, *dw = numbers(a->K), *ds = numbers(a->K);
            for (int j = a->first; j <= last; j++) dw[j] = dot(dout + at, a->value + j * D + h * E, E);
            for (int j = a->first; j <= last; j++) add(dvalue + j * D + h * E, w[j], dout + at, E);
            softmax_backward(ds, dw, w, a->K); // where w is 0, ds is
            for (int j = a->first; j <= last; j++) add(dquery + at, ds[j] / sqrt(E), a->key + j * D + h * E, E);
            for (int j = a->first; j <= last; j++) add(dkey + j * D + h * E, ds[j] / sqrt(E), a->query + at, E);
        }
}

static Run layer_forward(int l, const double *x, const double *inserted, int N, int slots, int present) {
    int K = slots + N;
    Run a = {N, K, slots, present ? 0 : slots, .source = numbers(K * D), .weights = numbers(H * N * K)};
    add(a.source, 1, inserted, slots * D);
    add(a.source + slots * D, 1, x, N * D);
    a.normed = norm_forward(a.source, of(l, "norm"), K);
    a.query = linear_forward(a.normed + slots * D, of(l, "query"), 1, N, D, D);
    a.key = linear_forward(a.normed, of(l, "key"), 1, K, D, D);
    a.value = linear_forward(a.normed, of(l, "value"), 1, K, D, D);
    a.attended = numbers(N * D);
    attention_forward(&a);
    a.after = linear_forward(a.attended, of(l, "output"), 1, N, D, D);
    add(a.after, 1, x, N * D);
    a.mlp_normed = norm_forward(a.after, of(l, "mlp_norm"), N);
    a.before_gelu = linear_forward(a.mlp_normed, of(l, "mlp_hidden"), 1, N, D, F);
    a.hidden = gelu_forward(a.before_gelu, N * F);
    a.output = linear_forward(a.hidden, of(l, "mlp_output"), 1, N, F, D);
    add(a.output, 1, a.after, N * D);
    return a;
}
static double *layer_backward(int l, double *dinserted, double *dout, const Run *a) {
    int N = a->N, K = a->K, in_front = a->slots * D;
    double *dhidden = linear_backward(dout, a->hidden, of(l, "mlp_output"), 1, N, F, D);
    double *dbefore_gelu = gelu_backward(dhidden, a->before_gelu, N * F);
    double *dmlp_normed = linear_backward(dbefore_gelu, a->mlp_normed, of(l, "mlp_hidden"), 1, N, D, F);
    double *dafter = norm_backward(dmlp_normed, a->after, of(l, "mlp_norm"), N);
    add(dafter, 1, dout, N * D);
    double *dattended = linear_backward(dafter, a->attended, of(l, "output"), 1, N, D, D);
    double *dquery = numbers(N * D), *dkey = numbers(K * D), *dvalue = numbers(K * D);
    attention_backward(dquery, dkey, dvalue, dattended, a);
    double *dnormed = linear_backward(dvalue, a->normed, of(l, "value"), 1, K, D, D);
    // A key's bias adds the same to all scores of a query: its gradient is exactly zero
    add(dnormed, 1, linear_backward(dkey, a->normed, of(l, "key"), 0, K, D, D), K * D);
    add(dnormed + in_front, 1, linear_backward(dquery, a->normed + in_front, of(l, "query"), 1, N, D, D), N * D);
    double *dsource = norm_backward(dnormed, a->source, of(l, "norm"), K);
    add(dinserted, 1, dsource, in_front);
    add(dafter, 1, dsource + in_front, N * D); // the residual, and the attention
    return dafter;
}

// ---- A window -------------------------------------------------------------------------------------------------------
typedef struct {
    int N, R, present;                 // R: rows that are pooled
    double *tokens, *targets, *scored; // (N)
    double *in[MAX_LAYERS + 1], *out[MAX_LAYERS + 1]; // of the module's parts; in[0] is the state, the last out (S, D)
    Run layers[MAX_LAYERS];
    double *outputs[MAX_LAYERS];       // what is pooled: the layers' outputs, or the last one after the final norm
    double *final, *logits, *probabilities, *shares, *mixed, *weights; // (N, D), (N, V), (N, V), (L), (N, D), (R)
    double *pooled;                    // the next state (D)
} Window;
static char *module_name(int i) { return i < module_layers ? text("module.hidden_%d", i + 1) : "module.inserted"; }
static int module_in(int i) { return i ? module_width : D; }
static int module_out(int i) { return i < module_layers ? module_width : S * D; }
static double *module_forward(Window *w) {
    for (int i = 0; i <= module_layers; i++) {
        if (i) w->in[i] = gelu_forward(w->out[i - 1], module_width);
        w->out[i] = linear_forward(w->in[i], module_name(i), 1, 1, module_in(i), module_out(i));
    }
    return w->out[module_layers];
}
static double *module_backward(double *dout, const Window *w) {
    for (int i = module_layers; i >= 0; i--) {
        dout = linear_backward(dout, w->in[i], module_name(i), 1, 1, module_in(i), module_out(i));
        if (i) dout = gelu_backward(dout, w->out[i - 1], module_width);
    }
    return dout;
}

static int largest(const Window *w, int d) { // the first row with the largest number d
    int best = 0;
    for (int i = 1; i < w->R; i++) best = w->mixed[i * D + d] > w->mixed[best * D + d] ? i : best;
    return best;
}
static void pool_forward(Window *w) { // Eq. 1. The mean is attention with scores of 0
    w->shares = numbers(L), w->mixed = numbers(w->N * D), w->weights = numbers(w->R), w->pooled = numbers(D);
    softmax_forward(w->shares, param("module.layer_scores", L)->data, L);
    for (int l = 0; l < L; l++) add(w->mixed, w->shares[l], w->outputs[l], w->N * D);
    for (int i = 0; i < w->R && pool_attention; i++)
        w->weights[i] = dot(w->mixed + i * D, param("module.fixed_key", D)->data, D) / sqrt(D);
    softmax_forward(w->weights, w->weights, w->R);
    for (int i = 0; i < w->R && !pool_max; i++) add(w->pooled, w->weights[i], w->mixed + i * D, D);
    for (int d = 0; d < D && pool_max; d++) w->pooled[d] = w->mixed[largest(w, d) * D + d];
}
static void pool_backward(double **doutputs, const double *dpooled, const Window *w) {
    double *dmixed = numbers(w->N * D), *dweights = numbers(w->R), *dscores = numbers(w->R), *dshares = numbers(L);
    for (int d = 0; d < D && pool_max; d++) dmixed[largest(w, d) * D + d] = dpooled[d];
    for (int i = 0; i < w->R && !pool_max; i++) add(dmixed + i * D, w->weights[i], dpooled, D);
    for (int i = 0; i < w->R; i++) dweights[i] = dot(w->mixed + i * D, dpooled, D);
    softmax_backward(dscores, dweights, w->weights, w->R);
    for (int i = 0; i < w->R && pool_attention; i++) {
        add(dmixed + i * D, dscores[i] / sqrt(D), param("module.fixed_key", D)->data, D);
        add(param("module.fixed_key", D)->grad, dscores[i] / sqrt(D), w->mixed + i * D, D);
    }
    for (int l = 0; l < L; l++) dshares[l] = dot(dmixed, w->outputs[l], w->N * D);
    for (int l = 0; l < L; l++) add(doutputs[l + (pool_final_norm && l == L - 1)], w->shares[l], dmixed, w->N * D);
    softmax_backward(param("module.layer_scores", L)->grad, dshares, w->shares, L);
}

static double window_forward(Window *w) { // returns the summed loss
    double loss = 0, *x = numbers(w->N * D), *inserted = S ? module_forward(w) : x;
    add(x, 1, param("positions", max_positions * D)->data, w->N * D);
    for (int i = 0; i < w->N; i++) add(x + i * D, 1, param("embedding", V * D)->data + (int)w->tokens[i] * D, D);
    for (int l = 0; l < L; l++) {
        w->layers[l] = layer_forward(l, x, inserted, w->N, is_insertion[l] ? S : 0, w->present);
        x = w->outputs[l] = w->layers[l].output;
    }
    w->final = norm_forward(x, "final_norm", w->N);
    if (pool_final_norm) w->outputs[L - 1] = w->final;
    w->logits = linear_forward(w->final, "embedding", 0, w->N, D, V);
    w->probabilities = numbers(w->N * V);
    for (int i = 0; i < w->N; i++) {
        softmax_forward(w->probabilities + i * V, w->logits + i * V, V);
        if (w->scored[i]) loss -= log(w->probabilities[i * V + (int)w->targets[i]]);
    }
    if (S) pool_forward(w);
    return loss;
}
// From the gradient of the next state, and the factor of every loss, to the gradient of the state
static double *window_backward(const double *dpooled, double factor, const Window *w) {
    double *dlogits = numbers(w->N * V), *dinserted = numbers(S * D), *doutputs[MAX_LAYERS + 1]; // the last: of final
    for (int l = 0; l <= L; l++) doutputs[l] = numbers(w->N * D);
    if (S) pool_backward(doutputs, dpooled, w);
    for (int i = 0; i < w->N; i++)
        for (int v = 0; v < V && w->scored[i]; v++)
            dlogits[i * V + v] = factor * (w->probabilities[i * V + v] - (v == w->targets[i]));
    add(doutputs[L], 1, linear_backward(dlogits, w->final, "embedding", 0, w->N, D, V), w->N * D);
    add(doutputs[L - 1], 1, norm_backward(doutputs[L], w->layers[L - 1].output, "final_norm", w->N), w->N * D);
    for (int l = L - 1; l > 0; l--)
        add(doutputs[l - 1], 1, layer_backward(l, dinserted, doutputs[l], &w->layers[l]), w->N * D);
    double *dx = layer_backward(0, dinserted, doutputs[0], &w->layers[0]);
    for (int i = 0; i < w->N; i++) add(param("embedding", V * D)->grad + (int)w->tokens[i] * D, 1, dx + i * D, D);
    add(param("positions", max_positions * D)->grad, 1, dx, w->N * D);
    return S ? module_backward(dinserted, w) : numbers(D);
}

// ---- The rollout and the steps --------------------------------------------------------------------------------------
static void window_read(Window *w, int k, int b, int B) { // lane b's part of segment k
    Tensor *t = look_up(text("given/%d/tokens", k));
    if (!t) fail("there is no tensor given/%d/tokens", k);
    int N = w->N = t->size / B;
    if (t->dims != 2 || t->shape[0] != B || N < 1 || N > max_positions) fail("%s has a bad shape", t->name);
    w->R = pool_advance ? fmax(1, N - overlap) : N;
    w->tokens = t->data + b * N;
    w->targets = find(text("given/%d/targets", k), B * N)->data + b * N;
    w->scored = find(text("given/%d/scored", k), B * N)->data + b * N;
    for (int i = 0; i < N; i++)
        if (fmin(w->tokens[i], w->targets[i]) < 0 || fmax(w->tokens[i], w->targets[i]) >= V)
            fail("segment %d has a token outside the vocabulary", k);
    int starts = find(text("given/%d/starts", k), B)->data[b]; // no slot, so no gradient to the state before
    w->present = S && !starts && (k || find("given/state/present", B)->data[b]);
    w->in[0] = starts || !S ? numbers(D) : k ? w[-B].pooled : find("given/state/pooled", B * D)->data + b * D;
}

// Keeps a result of shape (B, a, b, c), of which data is one lane's part. Zeros among a, b, c stand for no axis
static void save(const char *name, const double *data, int B, int lane, long a, long b, long c) {
    int bytes = strstr(name, "present") ? 1 : 8;
    if (!look_up(name)) add_tensor(name, bytes, 1 + (a > 0) + (b > 0) + (c > 0), (long[]){B, a, b, c});
    Tensor *t = look_up(name);
    memcpy(t->data + lane * (t->size / B), data, t->size / B * sizeof(double));
}
static void rollout(int keep) { // all segments forward, then all backward. keep: whether the results are written
    double count = 0, objective = 0, yes = 1;
    int K = 0, B = look_up("given/0/starts") ? look_up("given/0/starts")->size : 0;
    if (B < 1) fail("there is no tensor given/0/starts");
    while (look_up(text("given/%d/tokens", K)) || look_up(text("given/%d/starts", K))) K++;
    for (int i = 0; i < tensor_count; i++) memset(tensors[i].grad, 0, tensors[i].size * sizeof(double));
    Window *windows = zeros(K * B, sizeof(Window)), *w = windows;
    for (int k = 0; k < K; k++) {
        double loss = 0;
        for (int b = 0; b < B; b++, w++) {
            window_read(w, k, b, B);
            loss += window_forward(w);
            for (int i = 0; i < w->N; i++) count += w->scored[i];
            if (keep) save(text("%d/logits", k), w->logits, B, b, w->N, V, 0);
            if (keep && S) save(text("%d/next.pooled", k), w->pooled, B, b, D, 0, 0);
            if (keep && S) save(text("%d/next.present", k), &yes, B, b, 0, 0, 0);
            if (keep && S && !k) save("inner/inserted", w->out[module_layers], B, b, S, D, 0);
            if (keep && S && !k) save("inner/normed_input", w->layers[0].normed, B, b, w->layers[0].K, D, 0);
            if (keep && S && !k) save("inner/after_attention", w->layers[0].after, B, b, w->N, D, 0);
            if (keep && S && !k) save("inner/mlp_hidden", w->layers[0].hidden, B, b, w->N, F, 0);
            if (keep && S && !k) save("inner/mixed", w->mixed, B, b, w->R, D, 0);
        }
        objective += loss;
        if (keep) *add_tensor(text("%d/loss", k), 8, 0, NULL) = loss;
    }
    for (int b = 0; b < B; b++) {
        double *dpooled = numbers(D);
        for (int k = K - 1; k >= 0; k--) dpooled = window_backward(dpooled, 1 / count, &windows[k * B + b]);
        if (keep && S) save("grad_state/pooled", dpooled, B, b, D, 0, 0);
    }
    if (keep) *add_tensor("objective", 8, 0, NULL) = objective / count;
}

static void save_parameter(const char *prefix, Tensor p, const double *data, double rate) { // data - rate gradient
    double *to = add_tensor(text("%s/%s", prefix, p.name + strlen("given/param/")), 8, p.dims, p.shape);
    for (long i = 0; i < p.size; i++) to[i] = data[i] - rate * p.grad[i];
}
static void adamw(Tensor p, int step) {
    double beta1 = number("adamw", "beta1"), beta2 = number("adamw", "beta2"), rate = number("adamw", "rate");
    double epsilon = number("adamw", "epsilon"), decay = number("adamw", "decay");
    for (long i = 0; i < p.size; i++) {
        p.mean[i] = beta1 * p.mean[i] + (1 - beta1) * p.grad[i];
        p.square[i] = beta2 * p.square[i] + (1 - beta2) * p.grad[i] * p.grad[i];
        double mean = p.mean[i] / (1 - pow(beta1, step)), square = p.square[i] / (1 - pow(beta2, step));
        p.data[i] -= rate * (mean / (sqrt(square) + epsilon) + decay * p.data[i]);
    }
}

int main(int argc, char **argv) {
    if (argc != 3) fail("give two files: IN.safetensors OUT.safetensors");
    read_file(argv[1]);
    read_config();
    int given = tensor_count; // what is added from here on is written
    for (int step = 0; step <= 3; step++) { // 0 is the gradient and SGD, which leave the parameters as they are
        if (step != 1) rollout(step == 0);
        for (int i = 0; i < given; i++) {
            Tensor p = tensors[i];
            if (strncmp(p.name, "given/param/", strlen("given/param/"))) continue;
            if (step == 0) save_parameter("grad", p, numbers(p.size), -1);
            if (step == 0) save_parameter("sgd", p, p.data, number("sgd", "rate"));
            if (step > 0) adamw(p, step);
            if (step == 3) save_parameter("adamw", p, p.data, 0);
        }
    }
    write_file(argv[2], given);
    return 0;
}
