// The C ABI of the native CPU core: open a model, put its weights, run steps, close it.
//
// One shared object per instruction set exports exactly these functions; Python loads one with
// ctypes. Shape alphabet, here and in every source beside this file: T tokens in a step,
// S sequences, N context length, B positions a block, H heads, D head size, C width, L layers,
// V vocabulary, R rows whose logits are needed, K and N (of a matrix) inputs and outputs.
//
// Every function that can fail returns NS_OK or an NsStatus and writes a sentence into `error`.
// A model may be used from any thread: calls on one model take turns. A forked child may use it
// too, whatever the parent's threads were at. After ns_close a handle stays valid, and every call
// is refused or does nothing.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NS_ABI_VERSION 4
#define NS_MAX_TOP_LOGPROBS 64

enum NsStatus { NS_OK = 0, NS_INVALID = 1, NS_NO_MEMORY = 2, NS_CACHE_FULL = 3 };

// How values are stored: in a checkpoint (the first three) or in the KV cache (all four).
enum NsDtype { NS_FLOAT32 = 0, NS_BFLOAT16 = 1, NS_FLOAT16 = 2, NS_INT8 = 3 };

// How weight matrices are kept and multiplied. NS_W_INT8 quantises activations too.
enum NsWeights {
  NS_W_FLOAT32 = 0,
  NS_W_BFLOAT16 = 1,
  NS_W_INT8 = 2,
  NS_W_INT8_ONLY = 3,
  NS_W_INT4 = 4
};

enum NsActivation {
  NS_GELU_TANH = 0,  // gelu_new, gelu_fast, gelu_pytorch_tanh
  NS_GELU_ERF = 1,   // gelu
  NS_QUICK_GELU = 2,
  NS_RELU = 3,
  NS_SILU = 4,  // silu, swish
  NS_TANH = 5
};

typedef struct {
  int32_t vocab_size, n_positions, n_embd, n_layer, n_head, n_inner;
  int32_t activation;           // NsActivation
  int32_t tie_word_embeddings;  // 0 or 1
  float layer_norm_epsilon;
  int32_t weights;  // NsWeights
  int32_t cache;    // NsDtype
  int32_t block_size, num_blocks;  // of the KV cache, the scratch block included
  int32_t num_threads;             // the caller's thread included, at least 1
  int32_t num_token_ids;           // ids from here on are never drawn
  int32_t tile_rows;  // rows of a register tile; 0: chosen. For tests: it must not change a bit
} NsConfig;

typedef struct NsModel NsModel;

// `attention_scales` [L]: what q.k is multiplied by in each layer. `opened` is NULL on error.
int ns_open(const NsConfig* config, const float* attention_scales, NsModel** opened, char* error,
            int32_t error_size);

// As ns_open, over the complete weights of `donor`, which live as long as one of the two does.
// Shape and weight format must be the donor's; cache, threads and the rest are the new model's own.
int ns_share(NsModel* donor, const NsConfig* config, const float* attention_scales,
             NsModel** opened, char* error, int32_t error_size);

// One tensor under GPT-2's own name without "transformer." ("h.0.attn.c_attn.weight"): C-contiguous
// [rows][cols], a vector being [1][cols]. Converted and packed at once; the caller may free `data`.
int ns_put(NsModel* model, const char* name, const void* data, int32_t stored_dtype, int64_t rows,
           int64_t cols, char* error, int32_t error_size);

// NS_OK if every tensor came; else NS_INVALID naming what is missing. Required before a step.
int ns_ready(NsModel* model, char* error, int32_t error_size);

// How one row becomes a token: `engine.batch.RowSampling` and `request.SamplingParams` as plain C.
typedef struct {
  double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  double draw;           // the uniform in [0, 1) this row draws with
  const int32_t* prompt;  // [num_prompt]
  const int32_t* output;  // [num_output]
  const int32_t* bias_ids;  // [num_biases], distinct
  const double* biases;     // [num_biases]
  const int32_t* masked;    // [num_masked] ids that cannot be drawn in this row
  int32_t num_prompt, num_output, num_biases, num_masked;
  int32_t top_k;         // 0: off
  int32_t num_logprobs;  // -1: none wanted; k: the token's and the k best, k <= 64
  int32_t target;        // the token to score, or -1: draw one
  int32_t reserved;      // 0
} NsRow;

// `engine.batch.StepBatch` as plain C.
typedef struct {
  int32_t num_tokens, num_seqs, table_width, num_rows, num_copies;
  int32_t reserved;  // 0
  const int32_t* token_ids;     // [T]
  const int32_t* positions;     // [T]
  const int32_t* slot_mapping;  // [T] where each row's K and V are written
  const int32_t* query_starts;  // [S + 1] sequence s owns rows query_starts[s]:query_starts[s + 1]
  const int32_t* context_lens;  // [S] N of each sequence, this step's tokens included
  const int32_t* block_tables;  // [S][table_width]
  const int32_t* logit_rows;    // [R]
  const int32_t* block_copies;  // [num_copies][2] source, destination; done before any append
  const NsRow* rows;            // [R]; may be NULL if nothing is sampled
} NsBatch;

// Written by a step; the caller owns the arrays. Log-probabilities are NaN where none was asked.
typedef struct {
  int32_t* token_ids;    // [R], or NULL: nothing is sampled, and only `logits` is written
  double* logprobs;      // [R]
  uint8_t* finite;       // [R]
  int32_t* top_ids;      // [R][NS_MAX_TOP_LOGPROBS], best first; may be NULL if no row asks
  double* top_logprobs;  // [R][NS_MAX_TOP_LOGPROBS]; may be NULL if no row asks
  float* logits;         // [R][V], or NULL: they are not wanted
} NsResult;

// Checks the batch (NS_CACHE_FULL, NS_INVALID: nothing was written), then computes it.
int ns_step(NsModel* model, const NsBatch* batch, NsResult* result, char* error,
            int32_t error_size);

// The attention of a step alone, for benchmarks: in every layer these K and V are appended and this q
// attends, all [T][C] with T <= 512; `out` [T][C] is the last layer's. The batch needs no rows, and
// its token ids are not looked at beyond their range.
int ns_attend(NsModel* model, const NsBatch* batch, const float* q, const float* k, const float* v,
              float* out, char* error, int32_t error_size);

// A new, empty cache in place of the old one; for the recompute layout, which keeps nothing. After
// NS_NO_MEMORY the cache has no room at all until this succeeds.
int ns_resize_cache(NsModel* model, int32_t block_size, int32_t num_blocks, char* error,
                    int32_t error_size);

// Fill blocks with NaN, for tests: whoever reads a freed block then cannot hide it.
void ns_poison(NsModel* model, const int32_t* blocks, int32_t num_blocks);

// Give memory and threads back, once the call that is running returned. Again: nothing.
void ns_close(NsModel* model);

// All 0 once it is closed.
int64_t ns_weights_bytes(NsModel* model);
int64_t ns_cache_bytes(NsModel* model);    // reserved; a page is touched when first written
int64_t ns_scratch_bytes(NsModel* model);  // buffers of the largest step so far

// One row of logits [V] through the sampler, for its tests and for whoever times it; the arrays of
// `result` have one row. The calling thread keeps the scratch memory of its last vocabulary.
int ns_sample(const float* logits, int32_t vocab_size, int32_t num_token_ids, const NsRow* row,
              NsResult* result);

// Loads that measure this machine, on threads of their own. One thread calls a probe at a time.
typedef struct NsProbe NsProbe;

int ns_open_probe(int32_t num_threads, NsProbe** opened, char* error, int32_t error_size);

// One pass over `num_lines` times 256 bytes; `fetches` 1: asking for each line well before.
void ns_probe_read(NsProbe* probe, const void* data, int64_t num_lines, int32_t fetches);

// Makes the one product [M][K] x [K][N] that ns_probe_product computes, in an NsWeights.
int ns_put_product(NsProbe* probe, int32_t weights, int32_t M, int32_t K, int32_t N, char* error,
                   int32_t error_size);
int ns_probe_product(NsProbe* probe, char* error, int32_t error_size);

void ns_close_probe(NsProbe* probe);

// "portable", "avx2", "avx512" or "avx512_bf16_vnni": what this shared object was compiled for.
const char* ns_isa(void);

// NS_ABI_VERSION this object was compiled with; the loader refuses another.
int32_t ns_abi_version(void);

#ifdef __cplusplus
}
#endif
