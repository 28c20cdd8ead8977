// The C ABI over `Model`: exceptions become a status and a sentence, calls on one model take turns.
#include "ns.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "model.h"
#include "simd.h"

struct NsModel {
  ns::Model model;
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
  std::lock_guard<std::mutex> turn(model->model.mutex);
  return guarded(error, error_size, [&] { call(model->model); });
}

}  // namespace

extern "C" {

NS_EXPORT NsModel* ns_open(const NsConfig* config, const float* attention_scales, char* error,
                           int32_t error_size) {
  NsModel* opened = nullptr;
  guarded(error, error_size, [&] { opened = new NsModel{{*config, attention_scales}}; });
  return opened;
}

NS_EXPORT NsModel* ns_share(NsModel* donor, const NsConfig* config, const float* attention_scales,
                            char* error, int32_t error_size) {
  NsModel* opened = nullptr;
  guarded(donor, error, error_size,
          [&](ns::Model& m) { opened = new NsModel{{*config, attention_scales, &m}}; });
  return opened;
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

NS_EXPORT int ns_resize_cache(NsModel* model, int32_t block_size, int32_t num_blocks, char* error,
                              int32_t error_size) {
  return guarded(model, error, error_size,
                 [&](ns::Model& m) { m.resize_cache(block_size, num_blocks); });
}

NS_EXPORT int ns_set_threads(NsModel* model, int32_t num_threads, char* error,
                             int32_t error_size) {
  return guarded(model, error, error_size, [&](ns::Model& m) { m.set_threads(num_threads); });
}

NS_EXPORT void ns_poison(NsModel* model, const int32_t* blocks, int32_t num_blocks) {
  std::lock_guard<std::mutex> turn(model->model.mutex);
  for (int32_t i = 0; i < num_blocks; ++i)
    if (blocks[i] >= 0 && blocks[i] < model->model.config.num_blocks)
      model->model.cache->poison(blocks[i]);
}

NS_EXPORT void ns_close(NsModel* model) { delete model; }

NS_EXPORT int64_t ns_weights_bytes(const NsModel* model) { return model->model.weights_bytes(); }
NS_EXPORT int64_t ns_cache_bytes(const NsModel* model) { return model->model.cache->nbytes(); }
NS_EXPORT int64_t ns_scratch_bytes(const NsModel* model) { return model->model.scratch_bytes(); }

NS_EXPORT int ns_sample(const float* logits, int32_t vocab_size, int32_t num_token_ids,
                        const NsRow* row, NsResult* result) {
  return guarded(nullptr, 0, [&] {
    ns::Sampler(vocab_size).sample(logits, num_token_ids, *row, 0, *result);
  });
}

NS_EXPORT const char* ns_isa(void) { return ns::kIsa; }
NS_EXPORT int32_t ns_abi_version(void) { return NS_ABI_VERSION; }

}  // extern "C"
