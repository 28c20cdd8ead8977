#include "model.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "gemm_float.h"
#include "gemm_int4.h"
#include "gemm_int8.h"

namespace ns {

const Format& format_of(int32_t weights) {
  switch (weights) {
    case NS_W_FLOAT32: return kFloat32Format;
    case NS_W_BFLOAT16: return kBfloat16Format;
    case NS_W_INT8: return kInt8Format;
    case NS_W_INT8_ONLY: return kInt8OnlyFormat;
    case NS_W_INT4: return kInt4Format;
    default: throw std::invalid_argument("unknown weight format " + std::to_string(weights));
  }
}

int32_t checked_threads(int32_t num_threads) {
  require(num_threads >= 1 && num_threads <= 1024,
          "threads (--threads) must be between 1 and 1024, got " + std::to_string(num_threads));
  return num_threads;
}

namespace {

void require_positive(const char* name, int32_t value) {
  require(value >= 1, std::string(name) + " must be at least 1, got " + std::to_string(value));
}

void check(const NsConfig& config) {
  require_positive("vocab_size", config.vocab_size);
  require_positive("n_positions", config.n_positions);
  require_positive("n_embd", config.n_embd);
  require_positive("n_layer", config.n_layer);
  require_positive("n_head", config.n_head);
  require_positive("n_inner", config.n_inner);
  require_positive("block_size", config.block_size);
  require_positive("num_blocks", config.num_blocks);
  require_positive("num_token_ids", config.num_token_ids);
  require(config.num_token_ids <= config.vocab_size, "num_token_ids exceeds vocab_size");
  require(std::max(config.n_embd, config.n_inner) <= kMaxWidth,
          "n_embd and n_inner must be at most " + std::to_string(kMaxWidth));
  require(config.n_embd % config.n_head == 0, "n_embd must be a multiple of n_head");
  require(config.activation >= NS_GELU_TANH && config.activation <= NS_TANH,
          "unknown activation " + std::to_string(config.activation));
  require(config.cache >= NS_FLOAT32 && config.cache <= NS_INT8,
          "unknown cache dtype " + std::to_string(config.cache));
  require(config.tile_rows >= 0, "tile_rows must be 0 (chosen) or more");
}

// `count` stored values as fp32.
void widen(const void* data, int32_t dtype, int64_t first, int count, float* out) {
  if (dtype == NS_FLOAT32) {
    std::memcpy(out, static_cast<const float*>(data) + first, sizeof(float) * count);
    return;
  }
  const uint16_t* values = static_cast<const uint16_t*>(data) + first;
  if (dtype == NS_BFLOAT16)
    for (int i = 0; i < count; ++i) out[i] = float_of_bf16(values[i]);
  else
    for (int i = 0; i < count; ++i) out[i] = float_of_f16(values[i]);
}

}  // namespace

Model::Model(const NsConfig& given, const float* scales, const Model* donor) : config(given) {
  check(config);
  attention_scales.assign(scales, scales + config.n_layer);
  layers.resize(config.n_layer);
  Arena counted(nullptr);
  lay_out(counted);
  weights = donor ? donor->weights : std::make_shared<Memory>(counted.used(), "the weights");
  destinations.clear();
  Arena arena(weights->data());
  lay_out(arena);
  if (donor) borrow(*donor);
  resize_cache(config.block_size, config.num_blocks);
  start_threads();
}

// Equal shapes are laid out alike, so the donor's memory is ours as it stands.
void Model::borrow(const Model& donor) {
  const auto shape = [](const NsConfig& c) {
    return std::array<int32_t, 8>{c.vocab_size, c.n_positions, c.n_embd, c.n_layer,
                                  c.n_head, c.n_inner, c.tie_word_embeddings, c.weights};
  };
  require(shape(config) == shape(donor.config),
          "the donor's weights are of another shape or format");
  donor.check_complete();
  for (auto& [name, destination] : destinations) destination.came = true;
}

void Model::lay_out(Arena& arena) {
  const int C = config.n_embd;
  lay_out_columns(arena, "wte.weight", wte, C, config.vocab_size);
  const size_t value_bytes = config.weights == NS_W_FLOAT32 ? 4 : 2;
  wpe = arena.take<uint8_t>(static_cast<size_t>(config.n_positions) * padded(C) * value_bytes);
  Destination positions{Destination::kPositions};
  positions.rows = config.n_positions;
  positions.cols = C;
  destinations["wpe.weight"] = positions;
  for (int i = 0; i < config.n_layer; ++i) {
    const std::string name = "h." + std::to_string(i) + ".";
    lay_out_norm(arena, name + "ln_1", layers[i].ln_1);
    lay_out_linear(arena, name + "attn.c_attn", layers[i].c_attn, C, 3 * C);
    lay_out_linear(arena, name + "attn.c_proj", layers[i].attn_proj, C, C);
    lay_out_norm(arena, name + "ln_2", layers[i].ln_2);
    lay_out_linear(arena, name + "mlp.c_fc", layers[i].c_fc, C, config.n_inner);
    lay_out_linear(arena, name + "mlp.c_proj", layers[i].mlp_proj, config.n_inner, C);
  }
  lay_out_norm(arena, "ln_f", ln_f);
  if (config.tie_word_embeddings)
    lm_head = wte;
  else
    lay_out_columns(arena, "lm_head.weight", lm_head, C, config.vocab_size);
}

void Model::reserve_matrix(Arena& arena, Matrix& matrix, int K, int N) {
  matrix.format = &format_of(config.weights);
  matrix.K = K;
  matrix.N = N;
  matrix.panel_bytes = matrix.format->panel_bytes(K);
  matrix.panels = arena.take<uint8_t>(matrix.panel_bytes * matrix.num_panels());
}

float* Model::lay_out_vector(Arena& arena, const std::string& name, int width) {
  Destination destination{Destination::kVector};
  destination.vector = arena.take<float>(padded(width));
  destination.rows = 1;
  destination.cols = width;
  destinations[name] = destination;
  return destination.vector;
}

void Model::lay_out_norm(Arena& arena, const std::string& name, Norm& norm) {
  norm.weight = lay_out_vector(arena, name + ".weight", config.n_embd);
  norm.bias = lay_out_vector(arena, name + ".bias", config.n_embd);
}

// GPT-2's Conv1D: stored [in, out], which is [K][N].
void Model::lay_out_linear(Arena& arena, const std::string& name, Linear& linear, int K, int N) {
  reserve_matrix(arena, linear.weight, K, N);
  Destination destination{Destination::kMatrix};
  destination.matrix = &linear.weight;
  destination.rows = K;
  destination.cols = N;
  destinations[name + ".weight"] = destination;
  linear.bias = lay_out_vector(arena, name + ".bias", N);
}

// An embedding table, stored [V, C]: the head's matrix column by column.
void Model::lay_out_columns(Arena& arena, const std::string& name, Matrix& matrix, int K, int N) {
  reserve_matrix(arena, matrix, K, N);
  Destination destination{Destination::kMatrixByColumn};
  destination.matrix = &matrix;
  destination.rows = N;
  destination.cols = K;
  destinations[name] = destination;
}

void Model::put(const char* name, const void* data, int32_t stored_dtype, int64_t rows,
                int64_t cols) {
  const auto found = destinations.find(name);
  require(found != destinations.end(), std::string("this model has no tensor ") + name);
  Destination& destination = found->second;
  require(rows == destination.rows && cols == destination.cols,
          std::string(name) + " has shape [" + std::to_string(rows) + ", " + std::to_string(cols) +
              "], the config asks for [" + std::to_string(destination.rows) + ", " +
              std::to_string(destination.cols) + "]");
  require(stored_dtype >= NS_FLOAT32 && stored_dtype <= NS_FLOAT16,
          std::string(name) + " is stored in an unknown dtype " + std::to_string(stored_dtype));
  if (destination.kind == Destination::kVector)
    widen(data, stored_dtype, 0, static_cast<int>(cols), destination.vector);
  else if (destination.kind == Destination::kPositions)
    put_positions(data, stored_dtype);
  else
    pack(destination, data, stored_dtype);
  destination.came = true;
}

void Model::pack(const Destination& destination, const void* data, int32_t stored_dtype) {
  const Matrix& matrix = *destination.matrix;
  const int K = matrix.K, N = matrix.N;
  const bool by_column = destination.kind == Destination::kMatrixByColumn;
  const size_t size = static_cast<size_t>(K) * kPanel;
  std::vector<float> memory((size + static_cast<size_t>(K)) * pool->num_threads());
  pool->run(matrix.num_panels(), [&](int panel, int thread) {
    float* columns = memory.data() + (size + static_cast<size_t>(K)) * thread;  // [K][kPanel]
    float* column = columns + size;                                            // [K]
    const int first = panel * kPanel, count = std::min(kPanel, N - first);
    std::fill(columns, columns + size, 0.0f);
    if (by_column) {
      for (int n = 0; n < count; ++n) {
        widen(data, stored_dtype, static_cast<int64_t>(first + n) * K, K, column);
        for (int k = 0; k < K; ++k) columns[static_cast<size_t>(k) * kPanel + n] = column[k];
      }
    } else {
      for (int k = 0; k < K; ++k)
        widen(data, stored_dtype, static_cast<int64_t>(k) * N + first, count,
              columns + static_cast<size_t>(k) * kPanel);
    }
    matrix.format->pack(columns, K, matrix.panels + matrix.panel_bytes * panel);
  });
}

void Model::put_positions(const void* data, int32_t stored_dtype) {
  const int C = config.n_embd;
  std::vector<float> row(C);
  for (int position = 0; position < config.n_positions; ++position) {
    widen(data, stored_dtype, static_cast<int64_t>(position) * C, C, row.data());
    const size_t start = static_cast<size_t>(position) * padded(C);
    if (config.weights == NS_W_FLOAT32)
      std::copy(row.begin(), row.end(), reinterpret_cast<float*>(wpe) + start);
    else
      std::transform(row.begin(), row.end(), reinterpret_cast<uint16_t*>(wpe) + start, bf16_of);
  }
}

void Model::check_complete() const {
  std::string missing;
  int num_missing = 0;
  for (const auto& [name, destination] : destinations)
    if (!destination.came && ++num_missing <= 3) missing += (missing.empty() ? "" : ", ") + name;
  if (num_missing)
    throw std::invalid_argument(std::to_string(num_missing) + " of the model's " +
                                std::to_string(destinations.size()) +
                                " tensors never came, among them " + missing);
}

void Model::resize_cache(int32_t block_size, int32_t num_blocks) {
  require_positive("block_size", block_size);
  require_positive("num_blocks", num_blocks);
  require(static_cast<int64_t>(block_size) * num_blocks <= INT32_MAX,
          "the KV cache would have " + std::to_string(num_blocks) + " blocks of " +
              std::to_string(block_size) + " positions, at most " + std::to_string(INT32_MAX) +
              " positions have a number");
  const int64_t head_size = config.n_embd / config.n_head;
  require(block_size * align_up(head_size, kLanes) <= INT32_MAX,
          "a block of " + std::to_string(block_size) + " positions is too long for heads of " +
              std::to_string(head_size) + " (--block-size, --max-model-len)");
  replace_cache(block_size, 0);  // first, so that two never stand side by side
  replace_cache(block_size, num_blocks);
}

// Where there is no memory for it the old one stays.
void Model::replace_cache(int32_t block_size, int32_t num_blocks) {
  cache = std::make_unique<KvCache>(config.n_layer, config.n_head, config.n_embd / config.n_head,
                                    block_size, num_blocks, config.cache);
  config.block_size = block_size;
  config.num_blocks = num_blocks;
}

// What was forked in the middle of a step left scratch half-written, so that is new as well.
void Model::start_threads() {
  auto started = std::make_unique<Pool>(checked_threads(config.num_threads));
  abandon_foreign_threads();  // only now: the old ones stay where that fails
  pool = std::move(started);
  samplers.clear();
  buffers = Buffers();
}

void Model::make_threads_usable() {
  if (pool->belongs_to_another_process()) start_threads();
}

// See Pool: in a child it can be neither used nor destroyed.
void Model::abandon_foreign_threads() {
  if (pool && pool->belongs_to_another_process()) (void)pool.release();
}

Model::~Model() { abandon_foreign_threads(); }

int64_t Model::scratch_bytes() const {
  int64_t total = static_cast<int64_t>(buffers.memory.size());
  for (const auto& sampler : samplers) total += sampler->nbytes();
  return total;
}

}  // namespace ns
