// A model in memory: packed matrices, small vectors in fp32, the KV cache, threads and buffers.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "attention.h"
#include "formats.h"
#include "memory.h"
#include "ns.h"
#include "pool.h"
#include "sampler.h"

namespace ns {

inline void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

// Three times a width, and a panel of so many inputs, are still an int.
constexpr int32_t kMaxWidth = 1 << 24;

// Of an NsWeights. Throws std::invalid_argument for any other number.
const Format& format_of(int32_t weights);

// How many threads there may be, the caller's included. Throws std::invalid_argument.
int32_t checked_threads(int32_t num_threads);

// A batch addresses what the cache does not have; nothing was written.
struct CacheFull : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Values of a row of activations: whole panels, so that no store needs a tail.
inline size_t padded(int64_t width) { return align_up(static_cast<size_t>(width), kPanel); }

// [K][N] in panels of 32 columns.
struct Matrix {
  const Format* format = nullptr;
  int K = 0, N = 0;
  size_t panel_bytes = 0;
  uint8_t* panels = nullptr;

  int num_panels() const { return (N + kPanel - 1) / kPanel; }
};

struct Linear {
  Matrix weight;
  float* bias = nullptr;  // [padded(N)], zero beyond N
};

struct Norm {
  float *weight = nullptr, *bias = nullptr;  // [padded(C)]
};

struct Layer {
  Norm ln_1, ln_2;
  Linear c_attn, attn_proj, c_fc, mlp_proj;
};

// Where a named tensor goes. Exactly one of `matrix`, `vector` and `positions` is meant.
struct Destination {
  enum Kind { kMatrix, kMatrixByColumn, kVector, kPositions } kind;  // by column: stored [N][K]
  Matrix* matrix = nullptr;
  float* vector = nullptr;
  int64_t rows = 0, cols = 0;
  bool came = false;
};

// Buffers of a step. They grow to the largest step so far.
struct Buffers {
  Memory memory;
  float* x = nullptr;          // [T][padded(C)] the residual stream
  float* qkv = nullptr;        // [T][padded(3C)]
  float* mixed = nullptr;      // [T][padded(C)] a norm's output, or attention's
  float* inner = nullptr;      // [T][padded(n_inner)], or as many rows as mlp_proj's format reads
  uint8_t* prepared = nullptr; // [T] rows of C values in the form that a matrix's format reads
  float* hidden = nullptr;     // [R][padded(C)] rows of x whose logits are needed
  float* logits = nullptr;     // [rows at once][padded(V)]
  uint8_t* attention = nullptr;  // [threads][attention_bytes]
  size_t attention_bytes = 0;
};

struct Model {
  // `donor` lends its complete weights. Throws std::invalid_argument if they are of another shape.
  Model(const NsConfig& config, const float* attention_scales, const Model* donor = nullptr);
  ~Model();

  void put(const char* name, const void* data, int32_t stored_dtype, int64_t rows, int64_t cols);
  void check_complete() const;  // throws std::invalid_argument naming what is missing
  // Where the system has no memory for it, the cache is empty: a step is refused, not computed.
  void resize_cache(int32_t block_size, int32_t num_blocks);
  void make_threads_usable();  // in a forked child, new ones

  int64_t weights_bytes() const { return static_cast<int64_t>(weights->size()); }
  int64_t scratch_bytes() const;

  NsConfig config;
  std::vector<float> attention_scales;  // [L]
  std::shared_ptr<Memory> weights;  // shared with whoever was opened over them
  Matrix wte, lm_head;  // K = C, N = V; untied models have both
  uint8_t* wpe = nullptr;  // [n_positions][padded(C)], fp32 where the weights are, else bf16
  std::vector<Layer> layers;
  Norm ln_f;
  std::unordered_map<std::string, Destination> destinations;
  bool complete = false;

  std::unique_ptr<KvCache> cache;
  std::unique_ptr<Pool> pool;
  std::vector<std::unique_ptr<Sampler>> samplers;  // one per thread
  Buffers buffers;

 private:
  void borrow(const Model& donor);
  void replace_cache(int32_t block_size, int32_t num_blocks);
  void lay_out(Arena& arena);
  void lay_out_linear(Arena& arena, const std::string& name, Linear& linear, int K, int N);
  void lay_out_norm(Arena& arena, const std::string& name, Norm& norm);
  void lay_out_columns(Arena& arena, const std::string& name, Matrix& matrix, int K, int N);
  float* lay_out_vector(Arena& arena, const std::string& name, int width);
  void reserve_matrix(Arena& arena, Matrix& matrix, int K, int N);
  void pack(const Destination& destination, const void* data, int32_t stored_dtype);
  void put_positions(const void* data, int32_t stored_dtype);
  void start_threads();
  void abandon_foreign_threads();
};

// The whole of a step: checks, block copies, forward pass, logits, sampling. step.cpp
void run_step(Model& model, const NsBatch& batch, const NsResult& result);
void run_attention(Model& model, const NsBatch& batch, const float* q, const float* k,
                   const float* v, float* out);

}  // namespace ns
