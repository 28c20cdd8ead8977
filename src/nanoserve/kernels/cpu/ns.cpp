// The C ABI over `Model`: exceptions become a status and a sentence, calls on one model take turns.
#include "ns.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

#include <unistd.h>

#include "model.h"
#include "probe.h"
#include "simd.h"

// What a handle points to. It outlives its model and is never freed (some hundred bytes), so that a
// thread which comes late, or waited for its turn meanwhile, finds it closed and no garbage.
struct NsModel {
  explicit NsModel(std::unique_ptr<ns::Model> given)
      : model(std::move(given)), process_(getpid()), next_(all.load()) {
    while (!all.compare_exchange_weak(next_, this)) {
    }
  }

  // A forked child inherits the lock as it stood, maybe held by a thread that stayed behind.
  std::mutex& turns() {
    const pid_t here = getpid();
    if (process_.exchange(here) != here) new (&turns_) std::mutex;
    return turns_;
  }

  std::unique_ptr<ns::Model> model;  // none once it is closed

 private:
  static std::atomic<NsModel*> all;  // still reachable, for tools that look for leaks

  std::mutex turns_;
  std::atomic<pid_t> process_;
  NsModel* next_;
};

std::atomic<NsModel*> NsModel::all{nullptr};

struct NsProbe : ns::Probe {
  using Probe::Probe;
};

namespace {

#define NS_EXPORT __attribute__((visibility("default")))

int fail(int status, const char* message, char* error, int32_t error_size) {
  if (error && error_size > 0) {
    std::strncpy(error, message, static_cast<size_t>(error_size) - 1);
    error[error_size - 1] = '\0';
  }
  return status;
}

// Runs `call`; nothing it throws may cross the C ABI.
template <class Call>
int guarded(char* error, int32_t error_size, Call&& call) {
  try {
    call();
    return NS_OK;
  } catch (const ns::NoMemory& refused) {
    return fail(NS_NO_MEMORY, refused.what(), error, error_size);
  } catch (const std::bad_alloc&) {
    return fail(NS_NO_MEMORY, "the system has no memory left for this", error, error_size);
  } catch (const ns::CacheFull& refused) {
    return fail(NS_CACHE_FULL, refused.what(), error, error_size);
  } catch (const std::exception& refused) {
    return fail(NS_INVALID, refused.what(), error, error_size);
  }
}

template <class Call>
int guarded(NsModel* model, char* error, int32_t error_size, Call&& call) {
  std::lock_guard<std::mutex> turn(model->turns());
  if (!model->model) return fail(NS_INVALID, "this model was closed", error, error_size);
  return guarded(error, error_size, [&] { call(*model->model); });
}

// What `ask` gives of an open model, else 0.
template <class Ask>
int64_t bytes_of(NsModel* model, Ask&& ask) {
  std::lock_guard<std::mutex> turn(model->turns());
  return model->model ? ask(*model->model) : 0;
}

void open(const NsConfig& config, const float* attention_scales, const ns::Model* donor,
          NsModel** opened) {
  *opened = nullptr;
  *opened = new NsModel(std::make_unique<ns::Model>(config, attention_scales, donor));
}

}  // namespace

extern "C" {

NS_EXPORT int ns_open(const NsConfig* config, const float* attention_scales, NsModel** opened,
                      char* error, int32_t error_size) {
  return guarded(error, error_size, [&] { open(*config, attention_scales, nullptr, opened); });
}

NS_EXPORT int ns_share(NsModel* donor, const NsConfig* config, const float* attention_scales,
                       NsModel** opened, char* error, int32_t error_size) {
  return guarded(donor, error, error_size,
                 [&](ns::Model& m) { open(*config, attention_scales, &m, opened); });
}

NS_EXPORT int ns_put(NsModel* model, const char* name, const void* data, int32_t stored_dtype,
                     int64_t rows, int64_t cols, char* error, int32_t error_size) {
  return guarded(model, error, error_size,
                 [&](ns::Model& m) { m.put(name, data, stored_dtype, rows, cols); });
}

NS_EXPORT int ns_ready(NsModel* model, char* error, int32_t error_size) {
  return guarded(model, error, error_size, [](ns::Model& m) { m.check_complete(); });
}

NS_EXPORT int ns_step(NsModel* model, const NsBatch* batch, NsResult* result, char* error,
                      int32_t error_size) {
  return guarded(model, error, error_size,
                 [&](ns::Model& m) { ns::run_step(m, *batch, *result); });
}

NS_EXPORT int ns_attend(NsModel* model, const NsBatch* batch, const float* q, const float* k,
                        const float* v, float* out, char* error, int32_t error_size) {
  return guarded(model, error, error_size,
                 [&](ns::Model& m) { ns::run_attention(m, *batch, q, k, v, out); });
}

NS_EXPORT int ns_resize_cache(NsModel* model, int32_t block_size, int32_t num_blocks, char* error,
                              int32_t error_size) {
  return guarded(model, error, error_size,
                 [&](ns::Model& m) { m.resize_cache(block_size, num_blocks); });
}

NS_EXPORT void ns_poison(NsModel* model, const int32_t* blocks, int32_t num_blocks) {
  guarded(model, nullptr, 0, [&](ns::Model& m) {
    for (int32_t i = 0; i < num_blocks; ++i)
      if (blocks[i] >= 0 && blocks[i] < m.config.num_blocks) m.cache->poison(blocks[i]);
  });
}

NS_EXPORT void ns_close(NsModel* model) {
  std::lock_guard<std::mutex> turn(model->turns());
  model->model.reset();
}

NS_EXPORT int64_t ns_weights_bytes(NsModel* model) {
  return bytes_of(model, [](const ns::Model& m) { return m.weights_bytes(); });
}
NS_EXPORT int64_t ns_cache_bytes(NsModel* model) {
  return bytes_of(model, [](const ns::Model& m) { return m.cache->nbytes(); });
}
NS_EXPORT int64_t ns_scratch_bytes(NsModel* model) {
  return bytes_of(model, [](const ns::Model& m) { return m.scratch_bytes(); });
}

NS_EXPORT int ns_sample(const float* logits, int32_t vocab_size, int32_t num_token_ids,
                        const NsRow* row, NsResult* result) {
  return guarded(nullptr, 0, [&] {
    // As a model's threads do, this one keeps its scratch: filling it costs more than a greedy row.
    static thread_local std::unique_ptr<ns::Sampler> kept;
    std::unique_ptr<ns::Sampler> sampler = std::move(kept);  // lost if it fails midway
    if (!sampler || sampler->vocab_size() != vocab_size)
      sampler = std::make_unique<ns::Sampler>(vocab_size);
    sampler->sample(logits, num_token_ids, *row, 0, *result);
    kept = std::move(sampler);
  });
}

NS_EXPORT int ns_open_probe(int32_t num_threads, NsProbe** opened, char* error,
                            int32_t error_size) {
  *opened = nullptr;
  return guarded(error, error_size, [&] { *opened = new NsProbe(num_threads); });
}

NS_EXPORT void ns_probe_read(NsProbe* probe, const void* data, int64_t num_lines, int32_t fetches) {
  probe->read(static_cast<const uint8_t*>(data), num_lines * ns::kReadLine, fetches != 0);
}

NS_EXPORT int ns_put_product(NsProbe* probe, int32_t weights, int32_t M, int32_t K, int32_t N,
                             char* error, int32_t error_size) {
  return guarded(error, error_size, [&] { probe->put_product(weights, M, K, N); });
}

NS_EXPORT int ns_probe_product(NsProbe* probe, char* error, int32_t error_size) {
  return guarded(error, error_size, [&] { probe->multiply(); });
}

NS_EXPORT void ns_close_probe(NsProbe* probe) { delete probe; }

NS_EXPORT const char* ns_isa(void) { return ns::kIsa; }
NS_EXPORT int32_t ns_abi_version(void) { return NS_ABI_VERSION; }

}  // extern "C"
