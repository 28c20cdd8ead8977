// One step: GPT-2 over T token rows of any mix of sequences, then tokens for the rows asked for.
//
// The order of all sums is fixed (docs/EXACTNESS.md), and K and V are written before they are
// attended to. So neither batch mates, nor chunking, nor the slices below change a bit of a row.
#include <algorithm>
#include <cstring>
#include <string>

#include "linear.h"
#include "model.h"
#include "norm.h"

namespace ns {
namespace {

constexpr int kSliceRows = 512;   // token rows in flight: activations stay in the caches
constexpr int kLogitRows = 64;    // rows of logits computed before they are sampled
constexpr int kRowsPerChunk = 8;  // of a pass over rows
constexpr int kSerialAppend = 8;  // up to so many rows are appended by the caller's thread

std::string number(int64_t value) { return std::to_string(value); }

void require_fit(bool holds, const std::string& otherwise) {
  if (!holds) throw CacheFull(otherwise);
}

// ---- Checks: everything that a step will address, before anything is written.

void check_tokens(const NsConfig& config, const NsBatch& batch) {
  const int64_t num_slots = static_cast<int64_t>(config.block_size) * config.num_blocks;
  for (int t = 0; t < batch.num_tokens; ++t) {
    const int token = batch.token_ids[t], position = batch.positions[t];
    const int slot = batch.slot_mapping[t];
    require(token >= 0 && token < config.vocab_size,
            "token id " + number(token) + " is outside the vocabulary of " +
                number(config.vocab_size));
    require(position >= 0 && position < config.n_positions,
            "position " + number(position) + " is outside the model's " +
                number(config.n_positions));
    require_fit(slot >= 0 && slot < num_slots,
                "slot " + number(slot) + " is outside this cache's " + number(num_slots));
  }
}

void check_sequences(const NsConfig& config, const NsBatch& batch) {
  require(batch.query_starts[0] == 0 && batch.query_starts[batch.num_seqs] == batch.num_tokens,
          "query_starts must run from 0 to the number of tokens");
  for (int s = 0; s < batch.num_seqs; ++s) {
    const int64_t num_queries = int64_t{batch.query_starts[s + 1]} - batch.query_starts[s];
    const int64_t context_len = batch.context_lens[s];
    require(num_queries >= 0 && num_queries <= context_len,
            "sequence " + number(s) + " brings " + number(num_queries) +
                " tokens to a context of " + number(context_len));
    require(context_len <= config.n_positions,
            "a context of " + number(context_len) + " positions is longer than the model's " +
                number(config.n_positions));
    const int64_t num_blocks = (context_len + config.block_size - 1) / config.block_size;
    require_fit(num_blocks <= batch.table_width,
                "a context of " + number(context_len) + " positions needs " + number(num_blocks) +
                    " blocks of " + number(config.block_size) + ", its block table has " +
                    number(batch.table_width));
    const int32_t* table = batch.block_tables + static_cast<int64_t>(s) * batch.table_width;
    for (int i = 0; i < num_blocks; ++i)
      require_fit(table[i] >= 0 && table[i] < config.num_blocks,
                  "block " + number(table[i]) + " is attended to, this cache has " +
                      number(config.num_blocks));
  }
}

bool samples(const NsResult& result) { return result.token_ids != nullptr; }

void check_sampling(const NsConfig& config, const NsRow& row, int r, const NsResult& result) {
  require(row.target < config.vocab_size,
          "target " + number(row.target) + " is outside the vocabulary");
  require(row.num_logprobs <= NS_MAX_TOP_LOGPROBS,
          "at most " + number(NS_MAX_TOP_LOGPROBS) + " log-probabilities a row, got " +
              number(row.num_logprobs));
  require(row.num_logprobs <= 0 || (result.top_ids && result.top_logprobs),
          "row " + number(r) + " asks for log-probabilities, but there is no room for them");
}

void check_rows(const NsConfig& config, const NsBatch& batch, const NsResult& result) {
  require(samples(result) || result.logits || batch.num_rows == 0,
          "there is room neither for tokens nor for logits");
  for (int r = 0; r < batch.num_rows; ++r) {
    require(batch.logit_rows[r] >= 0 && batch.logit_rows[r] < batch.num_tokens,
            "logits of row " + number(batch.logit_rows[r]) + " are asked for, the step has " +
                number(batch.num_tokens));
    if (samples(result)) check_sampling(config, batch.rows[r], r, result);
  }
}

void check_copies(const NsConfig& config, const NsBatch& batch) {
  for (int i = 0; i < 2 * batch.num_copies; ++i)
    require_fit(batch.block_copies[i] >= 0 && batch.block_copies[i] < config.num_blocks,
                "block " + number(batch.block_copies[i]) +
                    " is copied from or to, this cache has " + number(config.num_blocks));
}

void check(const Model& model, const NsBatch& batch, const NsResult& result) {
  if (!model.complete) model.check_complete();
  require(batch.num_tokens >= 0 && batch.num_seqs >= 0 && batch.num_rows >= 0 &&
              batch.num_copies >= 0 && batch.table_width >= 0,
          "a count of the batch is negative");
  check_tokens(model.config, batch);
  check_sequences(model.config, batch);
  check_rows(model.config, batch, result);
  check_copies(model.config, batch);
}

// ---- Buffers.

void lay_out(Arena& arena, const Model& model, int num_tokens, int num_rows, Buffers& buffers) {
  const NsConfig& config = model.config;
  const size_t C = padded(config.n_embd), T = num_tokens, R = num_rows;
  const size_t logit_rows = std::min(num_rows, kLogitRows);
  buffers.x = arena.take<float>(T * C);
  buffers.qkv = arena.take<float>(T * padded(3 * static_cast<int64_t>(config.n_embd)));
  buffers.mixed = arena.take<float>(std::max(T, logit_rows) * C);
  buffers.inner = arena.take<float>(T * padded(config.n_inner));
  const size_t row_bytes = model.wte.format->row_bytes(config.n_embd);
  buffers.prepared = arena.take<uint8_t>(std::max(T, logit_rows) * row_bytes);
  buffers.hidden = arena.take<float>(R * C);
  buffers.logits = arena.take<float>(logit_rows * padded(config.vocab_size));
  buffers.attention = arena.take<uint8_t>(buffers.attention_bytes * model.pool->num_threads());
}

int tokens_at_once(const NsBatch& batch) { return std::min(batch.num_tokens, kSliceRows); }

void grow_buffers(Model& model, const NsBatch& batch) {
  int longest = 1;
  for (int s = 0; s < batch.num_seqs; ++s) longest = std::max(longest, batch.context_lens[s]);
  Buffers sized;
  sized.attention_bytes = align_up(attend_scratch_bytes(*model.cache, longest), 64);
  const int num_tokens = tokens_at_once(batch);
  Arena counted(nullptr);
  lay_out(counted, model, num_tokens, batch.num_rows, sized);
  if (counted.used() > model.buffers.memory.size()) {
    model.buffers.memory = Memory();  // first, so that two never stand side by side
    model.buffers.memory = Memory(counted.used() + counted.used() / 4,
                                  "a step (--max-num-batched-tokens, --max-num-seqs)");
  }
  sized.memory = std::move(model.buffers.memory);
  Arena arena(sized.memory.data());
  lay_out(arena, model, num_tokens, batch.num_rows, sized);
  model.buffers = std::move(sized);
  while (static_cast<int>(model.samplers.size()) < model.pool->num_threads())
    model.samplers.push_back(std::make_unique<Sampler>(model.config.vocab_size));
}

// ---- The forward pass.

// Some queries of one sequence and one head, all within the slice.
struct Queries {
  int sequence, head;
  int first, count;  // rows, counted from the slice's first
  int context_len;   // keys that the last of them sees
};

// Token rows [first, first + count) of the batch, through all layers.
class Slice {
 public:
  Slice(Model& model, const NsBatch& batch, int first, int count)
      : model_(model), batch_(batch), buffers_(model.buffers), pool_(*model.pool),
        first_(first), count_(count), C_(model.config.n_embd), width_(padded(C_)),
        qkv_width_(padded(3 * static_cast<int64_t>(C_))) {
    list_queries();
  }

  void run() {
    embed();
    for (int layer = 0; layer < model_.config.n_layer; ++layer) {
      attention(layer);
      feed_forward(model_.layers[layer]);
    }
    keep_hidden();
  }

  // What attention costs of `run`, alone: given rows [T][C] in place of those that c_attn computes.
  void run_attention(const float* q, const float* k, const float* v, float* out) {
    for (int row = 0; row < count_; ++row) {
      float* qkv = buffers_.qkv + qkv_width_ * row;
      const size_t start = static_cast<size_t>(row) * C_;
      std::copy_n(q + start, C_, qkv);
      std::copy_n(k + start, C_, qkv + C_);
      std::copy_n(v + start, C_, qkv + 2 * C_);
    }
    for (int layer = 0; layer < model_.config.n_layer; ++layer) append_and_attend(layer);
    for (int row = 0; row < count_; ++row)
      std::copy_n(buffers_.mixed + width_ * row, C_, out + static_cast<size_t>(row) * C_);
  }

 private:
  // Calls work(row, thread) for each row of the slice.
  template <class Work>
  void each_row(Work&& work) {
    pool_.run((count_ + kRowsPerChunk - 1) / kRowsPerChunk, [&](int chunk, int thread) {
      const int end = std::min(count_, (chunk + 1) * kRowsPerChunk);
      for (int row = chunk * kRowsPerChunk; row < end; ++row) work(row, thread);
    });
  }

  void embed() {
    const Matrix& wte = model_.wte;
    each_row([&](int row, int) {
      const int token = batch_.token_ids[first_ + row];
      float* x = buffers_.x + width_ * row;
      std::fill(x + C_, x + width_, 0.0f);
      wte.format->unpack_column(wte.panels + wte.panel_bytes * (token / kPanel), C_,
                                token % kPanel, x);
      add_position(batch_.positions[first_ + row], x);
    });
  }

  void add_position(int position, float* x) {
    const size_t start = width_ * position;
    const bool is_float = model_.config.weights == NS_W_FLOAT32;
    const float* floats = reinterpret_cast<const float*>(model_.wpe) + start;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(model_.wpe) + start;
    for (size_t i = 0; i < width_; i += kLanes)
      store(x + i, load(x + i) + (is_float ? load(floats + i) : load_bf16(halves + i)));
  }

  void attention(int layer) {
    const Layer& weights = model_.layers[layer];
    linear(weights.c_attn, normed(weights.ln_1, weights.c_attn), to(buffers_.qkv, qkv_width_));
    append_and_attend(layer);
    const Rows mixed = prepared(buffers_.mixed, width_, weights.attn_proj.weight);
    linear(weights.attn_proj, mixed, added_to_x());
  }

  void feed_forward(const Layer& weights) {
    const Output inner = activated_for(*weights.mlp_proj.weight.format);
    linear(weights.c_fc, normed(weights.ln_2, weights.c_fc), inner);
    linear(weights.mlp_proj, {inner.at(0, 0), inner.row_bytes, count_}, added_to_x());
  }

  // Activated rows in `inner`, stored at once in the form that `reader` multiplies.
  Output activated_for(const Format& reader) {
    Output output = to(buffers_.inner, padded(model_.config.n_inner));
    output.then = Then::kActivate;
    output.activation = model_.config.activation;
    if (reader.prepare_panels) {
      output.reader = &reader;
      output.row_bytes = reader.row_bytes(model_.config.n_inner);
    }
    return output;
  }

  static Output to(float* values, size_t stride) {
    Output output;
    output.values = values;
    output.row_bytes = sizeof(float) * stride;
    return output;
  }

  Output added_to_x() {
    Output output = to(buffers_.x, width_);
    output.then = Then::kAdd;
    return output;
  }

  void linear(const Linear& layer, const Rows& rows, const Output& output) {
    multiply(pool_, layer.weight, layer.bias, rows, output, model_.config.tile_rows);
  }

  // LayerNorm of x, in the form that `next` multiplies.
  Rows normed(const Norm& norm, const Linear& next) {
    const Format& format = *next.weight.format;
    const size_t row_bytes = format.row_bytes(C_);
    each_row([&](int row, int) {
      float* out = buffers_.mixed + width_ * row;
      layer_norm(buffers_.x + width_ * row, norm.weight, norm.bias, C_,
                 model_.config.layer_norm_epsilon, out);
      if (row_bytes) format.prepare(out, C_, buffers_.prepared + row_bytes * row);
    });
    return as_rows(buffers_.mixed, width_, row_bytes);
  }

  // Rows of fp32 values in the form that `matrix` multiplies.
  Rows prepared(const float* values, size_t stride, const Matrix& matrix) {
    const size_t row_bytes = matrix.format->row_bytes(matrix.K);
    if (row_bytes)
      each_row([&](int row, int) {
        matrix.format->prepare(values + stride * row, matrix.K,
                               buffers_.prepared + row_bytes * row);
      });
    return as_rows(values, stride, row_bytes);
  }

  Rows as_rows(const float* values, size_t stride, size_t row_bytes) {
    if (row_bytes) return {buffers_.prepared, row_bytes, count_};
    return {reinterpret_cast<const uint8_t*>(values), stride * sizeof(float), count_};
  }

  // One sequence alone reads nothing that another wrote in this step. Then whoever attends to a
  // head appends to it first, and both find its memory in their cache.
  void append_and_attend(int layer) {
    const int num_heads = model_.config.n_head;
    const bool is_alone = batch_.num_seqs == 1 && static_cast<int>(queries_.size()) == num_heads;
    if (!is_alone) append_all(layer);
    pool_.run(static_cast<int>(queries_.size()), [&](int index, int thread) {
      if (is_alone) append(layer, queries_[index].head);
      attend(layer, queries_[index], thread);
    });
  }

  void append_all(int layer) {
    const int num_heads = model_.config.n_head;
    if (count_ > kSerialAppend)
      return pool_.run(num_heads, [&](int head, int) { append(layer, head); });
    for (int head = 0; head < num_heads; ++head) append(layer, head);
  }

  void append(int layer, int head) {
    const float* k = buffers_.qkv + C_ + head * (C_ / model_.config.n_head);
    model_.cache->append(layer, head, k, k + C_, static_cast<int64_t>(qkv_width_),
                         batch_.slot_mapping + first_, count_);
  }

  void attend(int layer, const Queries& queries, int thread) {
    const int D = C_ / model_.config.n_head;
    AttendTask task;
    task.layer = layer;
    task.head = queries.head;
    task.table = batch_.block_tables +
                 static_cast<int64_t>(queries.sequence) * batch_.table_width;
    task.context_len = queries.context_len;
    task.num_queries = queries.count;
    task.q = buffers_.qkv + qkv_width_ * queries.first + queries.head * D;
    task.q_stride = static_cast<int64_t>(qkv_width_);
    task.out = buffers_.mixed + width_ * queries.first + queries.head * D;
    task.out_stride = static_cast<int64_t>(width_);
    task.scale = model_.attention_scales[layer];
    ns::attend(*model_.cache, task, buffers_.attention + buffers_.attention_bytes * thread);
  }

  void list_queries() {
    const int end = first_ + count_, num_heads = model_.config.n_head;
    for (int s = 0; s < batch_.num_seqs; ++s) {
      const int last = batch_.query_starts[s + 1];
      const int stop = std::min(last, end);
      for (int head = 0; head < num_heads; ++head)
        for (int row = std::max(batch_.query_starts[s], first_); row < stop; row += kQueryChunk) {
          const int count = std::min(kQueryChunk, stop - row);
          const int context_len = batch_.context_lens[s] - (last - row - count);
          queries_.push_back({s, head, row - first_, count, context_len});
        }
    }
  }

  void keep_hidden() {
    for (int r = 0; r < batch_.num_rows; ++r) {
      const int row = batch_.logit_rows[r] - first_;
      if (row >= 0 && row < count_)
        std::copy_n(buffers_.x + width_ * row, width_, buffers_.hidden + width_ * r);
    }
  }

  Model& model_;
  const NsBatch& batch_;
  Buffers& buffers_;
  Pool& pool_;
  const int first_, count_;
  const int C_;
  const size_t width_, qkv_width_;
  std::vector<Queries> queries_;
};

// ---- Logits and tokens.

// Where rows of logits lie: in the caller's array if they are wanted, else in our buffer.
Output logits_output(const Model& model, const NsResult& result, int first) {
  const size_t V = model.config.vocab_size;
  Output output;
  output.is_dense = result.logits != nullptr;
  output.values = output.is_dense ? result.logits + V * first : model.buffers.logits;
  output.row_bytes = sizeof(float) * (output.is_dense ? V : padded(model.config.vocab_size));
  return output;
}

// Final norm and head of rows [first, first + count) of `hidden`.
void compute_logits(Model& model, int first, int count, const Output& output) {
  const Buffers& buffers = model.buffers;
  const Matrix& head = model.lm_head;
  const int C = model.config.n_embd;
  const size_t width = padded(C), row_bytes = head.format->row_bytes(C);
  model.pool->run(count, [&](int row, int) {
    float* normed = buffers.mixed + width * row;
    layer_norm(buffers.hidden + width * (first + row), model.ln_f.weight, model.ln_f.bias, C,
               model.config.layer_norm_epsilon, normed);
    if (row_bytes) head.format->prepare(normed, C, buffers.prepared + row_bytes * row);
  });
  Rows rows{buffers.prepared, row_bytes, count};
  if (!row_bytes)
    rows = {reinterpret_cast<const uint8_t*>(buffers.mixed), width * sizeof(float), count};
  multiply(*model.pool, head, nullptr, rows, output, model.config.tile_rows);
}

void sample_rows(Model& model, const NsBatch& batch, const NsResult& result, int first, int count,
                 const Output& logits) {
  model.pool->run(count, [&](int row, int thread) {
    const int r = first + row;
    model.samplers[thread]->sample(reinterpret_cast<const float*>(logits.at(row, 0)),
                                   model.config.num_token_ids, batch.rows[r], r, result);
  });
}

}  // namespace

void run_step(Model& model, const NsBatch& batch, const NsResult& result) {
  check(model, batch, result);
  model.complete = true;
  model.make_threads_usable();
  grow_buffers(model, batch);
  const FlushDenormals flush;
  for (int i = 0; i < batch.num_copies; ++i)
    model.cache->copy_block(batch.block_copies[2 * i], batch.block_copies[2 * i + 1]);
  for (int first = 0; first < batch.num_tokens; first += kSliceRows)
    Slice(model, batch, first, std::min(kSliceRows, batch.num_tokens - first)).run();
  // Rows that are sampled are read again soon, and few are kept near. Of others, as many as the
  // buffers hold share a reading of the head.
  const int most = samples(result) ? kLogitRows : std::max(kLogitRows, tokens_at_once(batch));
  for (int first = 0; first < batch.num_rows; first += most) {
    const int count = std::min(most, batch.num_rows - first);
    const Output logits = logits_output(model, result, first);
    compute_logits(model, first, count, logits);
    if (samples(result)) sample_rows(model, batch, result, first, count, logits);
  }
}

void run_attention(Model& model, const NsBatch& batch, const float* q, const float* k,
                   const float* v, float* out) {
  require(batch.num_tokens >= 0 && batch.num_tokens <= kSliceRows && batch.num_seqs >= 0 &&
              batch.num_rows == 0 && batch.num_copies == 0 && batch.table_width >= 0,
          "attention alone takes at most " + number(kSliceRows) + " tokens, and neither logits nor "
          "copies");
  check_tokens(model.config, batch);
  check_sequences(model.config, batch);
  model.make_threads_usable();
  grow_buffers(model, batch);
  const FlushDenormals flush;
  Slice(model, batch, 0, batch.num_tokens).run_attention(q, k, v, out);
}

}  // namespace ns
