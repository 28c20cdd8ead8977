// Whole steps through the C ABI on small random models: a row's logits have the same bits however
// it was come by. Alone, in a ragged batch, in chunks, as one prefill, recomputed, in any block
// layout, with any number of threads and any tile. The digest of the last line must be the same on
// every instruction set.

#include "ns.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace {

struct Shape {
  int vocab, positions, width, layers, heads, inner, activation;
  bool tied;
};

// Draws in the order of the names, so every model of a shape has the same weights.
struct Weights {
  struct Tensor {
    std::string name;
    int rows, cols;
    std::vector<float> values;
  };
  std::vector<Tensor> tensors;

  explicit Weights(const Shape& shape) {
    Random random(static_cast<uint64_t>(shape.width * 31 + shape.inner));
    const int C = shape.width;
    add(random, "wte.weight", shape.vocab, C, 1.0f);
    add(random, "wpe.weight", shape.positions, C, 0.5f);
    for (int i = 0; i < shape.layers; ++i) {
      const std::string block = "h." + std::to_string(i) + ".";
      norm(random, block + "ln_1", C);
      linear(random, block + "attn.c_attn", C, 3 * C);
      linear(random, block + "attn.c_proj", C, C);
      norm(random, block + "ln_2", C);
      linear(random, block + "mlp.c_fc", C, shape.inner);
      linear(random, block + "mlp.c_proj", shape.inner, C);
    }
    norm(random, "ln_f", C);
    if (!shape.tied) add(random, "lm_head.weight", shape.vocab, C, 1.0f);
  }

  void add(Random& random, const std::string& name, int rows, int cols, float scale) {
    auto values = random.floats(static_cast<size_t>(rows) * cols);
    for (float& value : values) value *= scale;
    tensors.push_back({name, rows, cols, std::move(values)});
  }
  void linear(Random& random, const std::string& name, int K, int N) {
    add(random, name + ".weight", K, N, 1.0f / std::sqrt(static_cast<float>(K)));
    add(random, name + ".bias", 1, N, 0.1f);
  }
  void norm(Random& random, const std::string& name, int C) {
    add(random, name + ".weight", 1, C, 1.0f);
    add(random, name + ".bias", 1, C, 0.1f);
  }
};

struct Choice {
  int weights = NS_W_FLOAT32, cache = NS_FLOAT32;
  int block_size = 16, num_threads = 1, tile_rows = 0;
};

constexpr int kSequences = 5;  // ragged: of 1 to `positions` tokens
constexpr int kVictim = 3;     // the one whose logits are compared

class Engine {
 public:
  Engine(const Shape& shape, const Choice& choice)
      : shape_(shape), block_size_(choice.block_size),
        blocks_per_sequence_((shape.positions + block_size_ - 1) / block_size_),
        num_blocks_(blocks_per_sequence_ * kSequences + 1) {
    NsConfig config{};
    config.vocab_size = shape.vocab;
    config.n_positions = shape.positions;
    config.n_embd = shape.width;
    config.n_layer = shape.layers;
    config.n_head = shape.heads;
    config.n_inner = shape.inner;
    config.activation = shape.activation;
    config.tie_word_embeddings = shape.tied;
    config.layer_norm_epsilon = 1e-5f;
    config.weights = choice.weights;
    config.cache = choice.cache;
    config.block_size = block_size_;
    config.num_blocks = num_blocks_;
    config.num_threads = choice.num_threads;
    config.num_token_ids = shape.vocab;
    config.tile_rows = choice.tile_rows;
    std::vector<float> scales(static_cast<size_t>(shape.layers),
                              1.0f / std::sqrt(static_cast<float>(shape.width / shape.heads)));
    must(ns_open(&config, scales.data(), &model_, error_, sizeof error_));
    for (const auto& tensor : Weights(shape).tensors)
      must(ns_put(model_, tensor.name.c_str(), tensor.values.data(), NS_FLOAT32, tensor.rows,
                  tensor.cols, error_, sizeof error_));
    must(ns_ready(model_, error_, sizeof error_));
    Random random(99);
    order_ = random.permutation(num_blocks_ - 1);
    poison();
  }
  ~Engine() { ns_close(model_); }
  Engine(const Engine&) = delete;

  void poison() { ns_poison(model_, order_.data(), static_cast<int32_t>(order_.size())); }
  void poison(int sequence) {
    ns_poison(model_, order_.data() + sequence * blocks_per_sequence_, blocks_per_sequence_);
  }

  int token(int sequence, int position) const {
    return (sequence * 7919 + position * 104729 + position * position * 31) % shape_.vocab;
  }

  // Advance some sequences by some tokens in one step; logits [V] of each token of `kVictim`.
  struct Advance {
    int sequence, start, count;
  };
  std::vector<float> step(const std::vector<Advance>& advances) {
    std::vector<int32_t> tokens, positions, slots, starts{0}, lens, tables, rows;
    for (const Advance& a : advances) {
      const int32_t* blocks = order_.data() + a.sequence * blocks_per_sequence_;
      for (int p = a.start; p < a.start + a.count; ++p) {
        if (a.sequence == kVictim) rows.push_back(static_cast<int32_t>(tokens.size()));
        tokens.push_back(token(a.sequence, p));
        positions.push_back(p);
        slots.push_back(blocks[p / block_size_] * block_size_ + p % block_size_);
      }
      starts.push_back(static_cast<int32_t>(tokens.size()));
      lens.push_back(a.start + a.count);
      tables.insert(tables.end(), blocks, blocks + blocks_per_sequence_);
    }
    NsRow row{};
    row.top_p = 1.0;
    row.repetition_penalty = 1.0;
    row.num_logprobs = -1;
    row.target = -1;
    std::vector<NsRow> settings(rows.size(), row);
    NsBatch batch{};
    batch.num_tokens = static_cast<int32_t>(tokens.size());
    batch.num_seqs = static_cast<int32_t>(advances.size());
    batch.table_width = blocks_per_sequence_;
    batch.num_rows = static_cast<int32_t>(rows.size());
    batch.token_ids = tokens.data();
    batch.positions = positions.data();
    batch.slot_mapping = slots.data();
    batch.query_starts = starts.data();
    batch.context_lens = lens.data();
    batch.block_tables = tables.data();
    batch.logit_rows = rows.data();
    batch.rows = settings.data();
    return run(batch);
  }

  // A step that copies every block of `source` over those of `destination`, and no more.
  void copy(int source, int destination) {
    std::vector<int32_t> copies;
    for (int i = 0; i < blocks_per_sequence_; ++i) {
      copies.push_back(order_[source * blocks_per_sequence_ + i]);
      copies.push_back(order_[destination * blocks_per_sequence_ + i]);
    }
    const int32_t start = 0;
    NsBatch batch{};
    batch.num_copies = blocks_per_sequence_;
    batch.block_copies = copies.data();
    batch.query_starts = &start;
    run(batch);
  }

  std::vector<float> run(const NsBatch& batch) {
    const size_t num_rows = batch.num_rows;
    std::vector<int32_t> drawn(num_rows);
    std::vector<double> logprobs(num_rows);
    std::vector<uint8_t> finite(num_rows);
    std::vector<float> logits(num_rows * shape_.vocab);
    NsResult result{drawn.data(), logprobs.data(), finite.data(), nullptr, nullptr, logits.data()};
    must(ns_step(model_, &batch, &result, error_, sizeof error_));
    for (size_t r = 0; r < num_rows; ++r) {
      CHECK(finite[r], "row %zu is not finite", r);
      const float* row = logits.data() + r * shape_.vocab;
      CHECK(drawn[r] == std::max_element(row, row + shape_.vocab) - row, "greedy token");
    }
    return logits;
  }

  NsModel* model() { return model_; }

 private:
  void must(int status) { CHECK(status == NS_OK, "status %d: %s", status, error_); }

  const Shape shape_;
  const int block_size_, blocks_per_sequence_, num_blocks_;
  NsModel* model_;
  std::vector<int32_t> order_;
  char error_[256] = "";
};

// Logits of every position of the victim, [length][V], by one of the ways of getting there.
std::vector<float> whole(Engine& engine, int length) {
  return engine.step({{kVictim, 0, length}});
}

std::vector<float> chunked(Engine& engine, int length, int chunk) {
  std::vector<float> all;
  for (int start = 0; start < length; start += chunk) {
    const auto part = engine.step({{kVictim, start, std::min(chunk, length - start)}});
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

// The victim one token a step, among sequences that prefill, decode and pause beside it.
std::vector<float> ragged(Engine& engine, int length) {
  std::vector<float> all;
  std::vector<int> done(kSequences, 0);
  Random random(5);
  for (int position = 0; position < length; ++position) {
    std::vector<Engine::Advance> advances;
    for (int s = 0; s < kSequences; ++s) {
      const int left = length - done[s];
      const int count = s == kVictim ? 1 : std::min(left, random.below(4) * random.below(4));
      if (count == 0) continue;
      advances.push_back({s, done[s], count});
      done[s] += count;
    }
    const auto part = engine.step(advances);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

// A prefix, its blocks copied away and (their originals poisoned) back, then the rest.
std::vector<float> forked(Engine& engine, int length) {
  std::vector<float> all = chunked(engine, length / 2, 5);
  engine.copy(kVictim, 0);
  engine.poison(kVictim);
  engine.copy(0, kVictim);
  const auto rest = engine.step({{kVictim, length / 2, length - length / 2}});
  all.insert(all.end(), rest.begin(), rest.end());
  return all;
}

void compare(const char* way, const Choice& choice, const std::vector<float>& got,
             const std::vector<float>& wanted) {
  CHECK(same_bits(got, wanted),
        "%s differs (weights %d, cache %d, blocks of %d, %d threads, tiles of %d)", way,
        choice.weights, choice.cache, choice.block_size, choice.num_threads, choice.tile_rows);
}

// Every way in one layout, thread count and tile, against `reference`.
void compare_ways(const Shape& shape, const Choice& choice, const std::vector<float>& reference) {
  const int length = shape.positions;
  Engine engine(shape, choice);
  compare("whole prefill", choice, whole(engine, length), reference);
  compare("recomputed", choice, whole(engine, length), reference);
  engine.poison();
  compare("alone", choice, chunked(engine, length, 1), reference);
  engine.poison();
  compare("chunked", choice, chunked(engine, length, 7), reference);
  engine.poison();
  compare("ragged batch", choice, ragged(engine, length), reference);
  engine.poison();
  compare("forked", choice, forked(engine, length), reference);
}

void test_ways(const Shape& shape, int weights, int cache, Digest& digest) {
  Choice first;
  first.weights = weights;
  first.cache = cache;
  Engine engine(shape, first);
  const auto reference = whole(engine, shape.positions);
  digest.add(reference);
  compare_ways(shape, first, reference);
  for (int block_size : {1, 5, 32, shape.positions}) {
    Choice choice = first;
    choice.block_size = block_size;
    choice.num_threads = 2;
    choice.tile_rows = 1 + block_size % 12;
    compare_ways(shape, choice, reference);
  }
  for (int tile_rows : {1, 2, 3, 5, 8, 11}) {
    Choice choice = first;
    choice.tile_rows = tile_rows;
    choice.num_threads = 1 + tile_rows % 3;
    Engine other(shape, choice);
    compare("tiles", choice, whole(other, shape.positions), reference);
  }
}

// ---- Refusals: a status, a sentence, and nothing written.

void refuse(Engine& engine, NsBatch batch, int status, const char* what) {
  char error[256] = "";
  int32_t token = 0;
  double logprob = 0;
  uint8_t finite = 0;
  NsResult result{&token, &logprob, &finite, nullptr, nullptr, nullptr};
  const int got = ns_step(engine.model(), &batch, &result, error, sizeof error);
  CHECK(got == status && error[0], "%s: status %d, wanted %d (%s)", what, got, status, error);
}

void test_refusals(const Shape& shape) {
  Engine engine(shape, Choice{});
  const auto before = whole(engine, shape.positions);
  int32_t token = 1, position = 0, slot = 0, starts[] = {0, 1}, len = 1, table = 0, row = 0;
  NsRow setting{};
  setting.num_logprobs = -1;
  NsBatch good{};
  good.num_tokens = good.num_seqs = good.table_width = good.num_rows = 1;
  good.token_ids = &token;
  good.positions = &position;
  good.slot_mapping = &slot;
  good.query_starts = starts;
  good.context_lens = &len;
  good.block_tables = &table;
  good.logit_rows = &row;
  good.rows = &setting;
  auto with = [&](int32_t& field, int32_t value, int status, const char* what) {
    const int32_t saved = field;
    field = value;
    refuse(engine, good, status, what);
    field = saved;
  };
  with(token, shape.vocab, NS_INVALID, "token");
  with(token, -1, NS_INVALID, "token");
  with(position, shape.positions, NS_INVALID, "position");
  with(slot, 1 << 28, NS_CACHE_FULL, "slot");
  with(slot, -1, NS_CACHE_FULL, "slot");
  with(len, 0, NS_INVALID, "context");
  with(len, shape.positions + 1, NS_INVALID, "context");
  with(len, std::numeric_limits<int32_t>::max(), NS_INVALID, "context");
  with(len, 17, NS_CACHE_FULL, "table width");
  with(table, 1 << 20, NS_CACHE_FULL, "block");
  with(row, 1, NS_INVALID, "logit row");
  with(starts[1], 2, NS_INVALID, "query starts");
  with(setting.num_logprobs, 3, NS_INVALID, "no room for log-probabilities");
  with(setting.target, shape.vocab, NS_INVALID, "target");
  int32_t copy[] = {0, 1 << 20};
  good.block_copies = copy;
  good.num_copies = 1;
  refuse(engine, good, NS_CACHE_FULL, "copy");
  CHECK(same_bits(before, whole(engine, shape.positions)), "a refused step changed something");
}

// More tokens than a step holds in flight at once, and up to the longest context of GPT-2.
void test_long_contexts(Digest& digest) {
  const Shape shape{24, 1024, 16, 1, 2, 16, NS_SILU, true};
  for (const auto& [weights, cache] : {std::pair{NS_W_FLOAT32, NS_FLOAT32},
                                       std::pair{NS_W_BFLOAT16, NS_BFLOAT16},
                                       std::pair{NS_W_INT8, NS_INT8}}) {
    const Choice one{weights, cache, 16, 1, 0}, two{weights, cache, 24, 2, 0};
    Engine engine(shape, one), other(shape, two);
    const auto reference = whole(engine, shape.positions);
    digest.add(reference);
    engine.poison();
    compare("one slice after another", one, chunked(engine, shape.positions, 100), reference);
    // One sequence, but several chunks of queries a head: who attends may not be who appended.
    compare("whole, two threads", two, whole(other, shape.positions), reference);
    other.poison();
    const int chunk = weights == NS_W_FLOAT32 ? 1 : 7;  // each token alone is dear where FMA is
    compare("in small chunks", two, chunked(other, shape.positions, chunk), reference);
  }
}

void test_weights_are_strict(const Shape& shape) {
  NsConfig config{};
  char error[256] = "";
  const std::vector<float> scales(16, 1.0f);
  NsModel* model = nullptr;
  const int status = ns_open(&config, scales.data(), &model, error, sizeof error);
  CHECK(status == NS_INVALID && !model && error[0], "an empty config");
  config = {shape.vocab, shape.positions, shape.width, 1, shape.heads, shape.inner, NS_RELU, 1,
            1e-5f, NS_W_FLOAT32, NS_FLOAT32, 16, 4, 1, shape.vocab, 0};
  CHECK(ns_open(&config, scales.data(), &model, error, sizeof error) == NS_OK, "%s", error);
  const std::vector<float> values(static_cast<size_t>(shape.vocab) * shape.width);
  CHECK(ns_ready(model, error, sizeof error) == NS_INVALID, "nothing came");
  CHECK(ns_put(model, "h.1.ln_1.bias", values.data(), 0, 1, shape.width, error, sizeof error),
        "a layer too many");
  CHECK(ns_put(model, "wte.weight", values.data(), 0, shape.width, shape.vocab, error,
               sizeof error),
        "a transposed table");
  CHECK(!ns_put(model, "wte.weight", values.data(), 0, shape.vocab, shape.width, error,
                sizeof error),
        "the table itself: %s", error);
  const NsBatch batch{};
  NsResult result{};
  CHECK(ns_step(model, &batch, &result, error, sizeof error) == NS_INVALID, "a step too early");
  ns_close(model);
}

// A handle outlives its model: whoever comes late is refused and reads no freed memory.
void test_closed(const Shape& shape) {
  NsConfig config{shape.vocab, shape.positions, shape.width, 1, shape.heads, shape.inner, NS_RELU,
                  1, 1e-5f, NS_W_FLOAT32, NS_FLOAT32, 16, 4, 2, shape.vocab, 0};
  char error[256] = "";
  const float scale = 1.0f;
  NsModel *model = nullptr, *heir = nullptr;
  CHECK(ns_open(&config, &scale, &model, error, sizeof error) == NS_OK, "%s", error);
  ns_close(model);
  ns_close(model);
  const NsBatch batch{};
  NsResult result{};
  const int32_t block = 0;
  ns_poison(model, &block, 1);
  CHECK(ns_step(model, &batch, &result, error, sizeof error) == NS_INVALID, "a step");
  CHECK(std::strstr(error, "closed"), "%s", error);
  CHECK(ns_share(model, &config, &scale, &heir, error, sizeof error) == NS_INVALID && !heir,
        "an heir");
  CHECK(ns_weights_bytes(model) + ns_cache_bytes(model) + ns_scratch_bytes(model) == 0, "bytes");
}

// More than there is address space for: refused with the number of bytes, and nothing lost.
void test_no_memory(const Shape& shape) {
  NsConfig config{shape.vocab, shape.positions, shape.width, 1, shape.heads, shape.inner, NS_RELU,
                  1, 1e-5f, NS_W_FLOAT32, NS_FLOAT32, 1 << 20, 2047, 1, shape.vocab, 0};
  char error[256] = "";
  const std::vector<float> scales(1 << 12, 1.0f);
  NsModel* model = nullptr;
  config.n_layer = 1 << 12;
  CHECK(ns_open(&config, scales.data(), &model, error, sizeof error) == NS_NO_MEMORY, "%s", error);
  CHECK(std::strstr(error, "bytes left for the KV cache") && !model, "%s", error);
  config.n_layer = 1;
  config.num_blocks = 1 << 12;  // more positions than a slot's number can tell apart
  CHECK(ns_open(&config, scales.data(), &model, error, sizeof error) == NS_INVALID, "%s", error);
  CHECK(std::strstr(error, "2147483647"), "%s", error);
}

}  // namespace

int main() {
  Digest digest;
  const Shape shapes[] = {
      {101, 48, 64, 2, 4, 256, NS_GELU_TANH, true},
      {67, 37, 42, 2, 3, 70, NS_GELU_ERF, false},  // odd sizes: heads of 14, nothing a multiple
      {33, 24, 300, 1, 5, 530, NS_QUICK_GELU, true},  // sums of more than one block
  };
  for (const Shape& shape : shapes)
    for (int weights : {NS_W_FLOAT32, NS_W_BFLOAT16, NS_W_INT8, NS_W_INT8_ONLY, NS_W_INT4})
      for (int cache : {NS_FLOAT32, NS_BFLOAT16, NS_FLOAT16, NS_INT8})
        if (weights <= NS_W_BFLOAT16 || cache == NS_INT8) test_ways(shape, weights, cache, digest);
  test_long_contexts(digest);
  test_refusals(shapes[1]);
  test_weights_are_strict(shapes[1]);
  test_closed(shapes[1]);
  test_no_memory(shapes[1]);
  std::printf("%s: %d failures\n", ns_isa(), failures());
  std::printf("step digest %016llx\n", digest.value());
  return failures() != 0;
}
