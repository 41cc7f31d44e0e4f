// The C ABI of the CPU library: what ctypes, C++ embedders and the race tests call. Plain C types only.
//
// A context belongs to one process and one rank. Functions that return int return a Result (signal.h): 0 is success, kFailed
// means that the communicator is broken and a2a_failure says why. None of them throws, and none of them traps.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define A2A_API extern "C" __attribute__((visibility("default")))

typedef struct a2a_context a2a_context;
typedef struct a2a_ticket a2a_ticket;
typedef struct a2a_moe a2a_moe;

A2A_API uint32_t a2a_abi(void);
A2A_API const char* a2a_isa(void);             // "plain", "avx2" or "avx512": what this CPU runs
A2A_API int a2a_select_isa(const char* name);  // for tests; 0 if this CPU or build lacks it

// --- life of a context
A2A_API size_t a2a_control_bytes(uint32_t world, size_t staging_bytes);
A2A_API void a2a_format(void* base, uint32_t world, size_t staging_bytes, uint32_t first_epoch);
A2A_API void* a2a_map(int fd, size_t bytes);  // null on failure
A2A_API void a2a_unmap(void* base, size_t bytes);
A2A_API a2a_context* a2a_attach(void* base, size_t mapped_bytes, uint32_t rank, uint32_t world, size_t staging_bytes,
                                const int* pidfds, uint32_t cores, double spin_us, double timeout_s,
                                int (*interrupted)(void));
A2A_API void a2a_set_timeout(a2a_context*, double timeout_s);
// Stops the progress thread, ends calls of other threads, tells peers; memory stays. 0: a call did not end, and needs the memory.
A2A_API int a2a_close(a2a_context*);
A2A_API void a2a_destroy(a2a_context*);                                // after close; unmaps the control segment
A2A_API int a2a_add_segment(a2a_context*, void* base, size_t stride);  // index, or -1
A2A_API void a2a_populate(void* base, size_t bytes);                   // touch pages, so that no op pays for it

A2A_API int a2a_read(int pid, uint64_t from, void* to, size_t bytes);  // process_vm_readv: 0, or errno
A2A_API void a2a_enable_reads(a2a_context*, const int* pids);  // when every rank may read every other; null: not

// --- failures and facts
A2A_API uint64_t a2a_failure(a2a_context*);  // 0, or cause << 48 | by << 32 | peer << 16 | text
A2A_API const char* a2a_cause_text(a2a_context*, uint32_t rank);
A2A_API const char* a2a_request_text(a2a_context*, uint32_t rank, uint32_t text);
A2A_API void a2a_fail(a2a_context*, uint32_t cause, uint32_t peer, const char* message);
A2A_API uint32_t a2a_last_peer(a2a_context*);   // whose refusal the last kPeerRefused was about
A2A_API const char* a2a_refusal(a2a_context*);  // and why
A2A_API uint32_t a2a_peer_epoch(a2a_context*, uint32_t peer);
A2A_API uint32_t a2a_epoch(a2a_context*);
A2A_API uint32_t* a2a_ok_word(a2a_context*);
A2A_API void a2a_stats(a2a_context*, uint64_t* per_peer_3, uint64_t* totals_6);

// --- collectives. `request` is the index that a2a_request gave to {digest, text}.
A2A_API int a2a_request(a2a_context*, uint64_t digest, uint64_t row_bytes, const char* text);
A2A_API int a2a_refuse(a2a_context*, uint32_t request,
                       const char* why);  // this rank can't make its call: tell the peers
A2A_API int a2a_barrier(a2a_context*, uint32_t request);
A2A_API int a2a_all_gather_small(a2a_context*, uint32_t request, void* out, const void* in, size_t bytes);
A2A_API int a2a_all_to_all_even(a2a_context*, uint32_t request, void* out, const void* in, size_t bytes_per_peer);
typedef struct {  // the same, prepared: a foreign-function call pays for every argument
  a2a_context* context;
  uint64_t request, bytes_per_peer;
} a2a_even;
A2A_API int a2a_all_to_all_again(const a2a_even*, void* out, const void* in);
A2A_API int a2a_all_to_all(a2a_context*, uint32_t request, void* const* out, const uint64_t* recv_bytes,
                           const void* const* in, const uint64_t* send_bytes);

// --- all-reduce, reduce-scatter and all-gather of contiguous memory, prepared as above
enum { A2A_ALL_REDUCE = 0, A2A_REDUCE_SCATTER = 1, A2A_ALL_GATHER = 2 };
typedef struct {
  a2a_context* context;
  uint32_t request, kind;
  uint32_t dtype, reduce;  // Dtype and ReduceOp of simd.h; not looked at by an all-gather
  uint32_t two_shot, unused;
  uint64_t
      count;  // elements of the tensor (all-reduce) or of a rank's share (reduce-scatter); bytes of a share (all-gather)
} a2a_reduction;
A2A_API size_t a2a_one_shot_bytes(void);              // the most that a rank may put into a one-shot
A2A_API size_t a2a_two_shot_row_bytes(a2a_context*);  // the longest row that a two-shot of rows takes
A2A_API int a2a_reduce(const a2a_reduction*, void* out, const void* in);
A2A_API a2a_ticket* a2a_submit_reduction(const a2a_reduction*, void* out, const void* in);
typedef struct {
  a2a_reduction reduction;  // an all-reduce by sum of float32, bfloat16 or float16; count is a multiple of columns
  uint32_t columns;         // of a row
  float eps;
} a2a_norm;
// residual_out = residual + all-reduce of in, out = RMSNorm of its rows * weight (simd_norm.h). out and residual_out may each be in
// or residual.
A2A_API int a2a_reduce_norm(const a2a_norm*, void* out, void* residual_out, const void* in, const void* residual,
                            const void* weight);

// --- prepared calls as functions of CPython's (python.cpp). Called with the GIL; objects of Python's are void*.
typedef struct {                                                                  // by address, out of Python's C API
  void* (*pointer_of)(void* capsule, const char* name);                           // PyCapsule_GetPointer
  void* (*new_capsule)(void*, const char* name, void (*free)(void*));             // PyCapsule_New
  void* (*new_function)(const void* definition, void* self, void* module);        // PyCFunction_NewEx
  void* (*integer)(long);                                                         // PyLong_FromLong
  void* (*call)(void* function, void* const* arguments, size_t, void* keywords);  // PyObject_Vectorcall
  void (*forget)(void*);                                                          // Py_DecRef
  void (*clear_error)(void);                                                      // PyErr_Clear
  void* (*no_memory)(void);                                                       // PyErr_NoMemory
  void* (*release_gil)(void);                                                     // PyEval_SaveThread
  void (*take_gil)(void* thread);                                                 // PyEval_RestoreThread
  void* (*type_of)(void*);                                                        // PyObject_Type
  void* (*attribute)(void*, const char* name);                                    // PyObject_GetAttrString
  ptrdiff_t (*list_size)(void* list);                                             // PyList_Size
  void* (*list_at)(void* list, ptrdiff_t);                                        // PyList_GetItem
  ptrdiff_t (*tuple_size)(void* tuple);                                           // PyTuple_Size
  void* (*tuple_at)(void* tuple, ptrdiff_t);                                      // PyTuple_GetItem
  long long (*to_int64)(void* integer);                                           // PyLong_AsLongLong
  int (*describe)(void* tensor, void* dltensor);  // dltensor_from_py_object_no_sync of torch's DLPack table
  void *no, *none, *list, *tuple, *int_type;      // False and None; the types
  void *is_neg, *is_conj;                         // methods of tensors
} a2a_python;
enum { A2A_ALL_TO_ALL = 3 };                      // a kind beside those of reductions
A2A_API void a2a_python_bind(const a2a_python*);  // once, before anything below
A2A_API void* a2a_prepared_create(void);          // a capsule
// By kind: all_reduce(tensor, op), reduce_scatter(output, input, op), all_gather(output, input) or all_to_all(output, input,
// output_splits, input_splits). They return a Result or, if `later`, the ticket of a call on the progress thread; or -1: no such call
// was made before.
A2A_API void* a2a_prepared_function(void* capsule, uint32_t kind, int later);
// `op`: a member of torch's ReduceOp; `made`: an a2a_reduction, or an a2a_even, of which the bytes are not looked at.
A2A_API void a2a_prepared_add(void* capsule, uint32_t kind, void* op, void* output, void* input, const void* made);
A2A_API void a2a_prepared_clear(void* capsule);
A2A_API size_t a2a_prepared_count(void* capsule);

// --- what the algorithms are made of, for the cost model (primitives.cpp): no collective, and nobody is told anything
enum {
  A2A_STEP_COPY = 0,         // through the caches
  A2A_STEP_STREAM = 1,       // past them
  A2A_STEP_FETCH = 2,        // into them
  A2A_STEP_READ = 3,         // from another rank's process, by the system
  A2A_STEP_READ_STREAM = 4,  // the same by way of a small buffer, and past the caches from there
  A2A_STEP_SUM = 5,          // of `terms` places
  A2A_STEP_SUM_STREAM = 6    // the same past the caches
};
enum { A2A_STEP_TERMS = 128 };
typedef struct {  // a tensor, or `slots` slots that lie `stride` apart and are used in turn
  void* base;
  uint64_t stride;
  uint32_t slots, unused;
} a2a_place;
typedef struct {
  uint32_t kind, dtype, terms, rank;  // terms: places at `in`, at least 1; dtype: of a sum; rank: whose memory is read
  a2a_place out;
  const a2a_place* in;
} a2a_step;
// All steps for each chunk of `bytes`, `times` times over. 0, errno of a read, or kInvalid.
A2A_API int a2a_run_steps(a2a_context*, const a2a_step* steps, uint32_t count, size_t bytes, size_t chunk,
                          uint32_t times);
A2A_API void* a2a_peer_memory(a2a_context*, uint32_t rank, uint64_t address);  // a symmetric address, of that rank

// --- collectives on the progress thread: first in first out with all else on this context
A2A_API a2a_ticket* a2a_submit(a2a_context*, uint32_t request, void* const* out, const uint64_t* recv_bytes,
                               const void* const* in, const uint64_t* send_bytes);
A2A_API a2a_ticket* a2a_submit_refusal(a2a_context*, uint32_t request, const char* why);
A2A_API int a2a_test(a2a_ticket*);                    // kPending, or the op's result
A2A_API int a2a_wait(a2a_ticket*, double timeout_s);  // kPending after timeout_s
A2A_API uint32_t a2a_ticket_peer(a2a_ticket*);        // whose refusal it was, after kPeerRefused
A2A_API const char* a2a_ticket_refusal(a2a_ticket*);  // and why: its own copy, which later refusals leave alone; or ""
A2A_API void a2a_release(a2a_ticket*);

// --- Mixture of Experts
A2A_API a2a_moe* a2a_moe_create(a2a_context*, uint32_t experts, uint32_t top_k, uint32_t hidden, uint32_t max_tokens,
                                uint32_t dtype, uint32_t alignment, uint32_t wire, uint32_t wire_combine,
                                const int32_t* expert_to_rank, uint64_t counts_address);
A2A_API void a2a_moe_destroy(a2a_moe*);
// Tokens of other ranks. Each rank brings `parts` lots of tokens to a dispatch: part i of rank r are tokens of the source
// source[r * parts + i], or none where that is -1; part 0 are its own. Sources are distinct, equal on all ranks, and what rows
// are ordered by and named after. Before the first dispatch.
A2A_API void a2a_moe_sources(a2a_moe*, uint32_t parts, const int32_t* source);
typedef struct {
  const void *rows, *scales;  // [tokens, hidden]; scales: as x_scales of a2a_moe_dispatch
  const int32_t* number;      // [tokens] what the source calls them; null: 0, 1, ...
  uint32_t tokens, unused;
} a2a_moe_part;
// What this rank brings: [parts], read by each a2a_moe_count, a2a_moe_dispatch and a2a_moe_spread from now on; null: what their
// arguments say. Tokens, ids, weights and g are then those of all parts, one after the other. With a wire format either all parts
// have scales (not null, also of no tokens) or none has.
A2A_API void a2a_moe_bring(a2a_moe*, const a2a_moe_part* parts);
// Publishes counts and learns everybody's. Leaves the context locked on success: a2a_moe_dispatch or a2a_moe_abort follows.
//   result[0] rows with padding, [1] rows without, [2] distinct received tokens, [3..] true rows of each local expert
A2A_API int a2a_moe_count(a2a_moe*, uint32_t request, const void* ids, int ids_bytes, uint32_t tokens,
                          uint64_t direct_base, int64_t* result);
A2A_API void a2a_moe_abort(a2a_moe*);
typedef struct {
  void* rows;                 // [capacity, hidden] dtype; or q when rows_wire; or the distinct tokens when compact
  void* scales;               // rows_wire: [capacity, blocks]
  float* weights;             // [capacity]
  int32_t *rank, *token, *k;  // [capacity]
  int32_t* index;             // compact: [capacity] row -> distinct token
  int32_t* offsets;           // [local experts]
  int32_t* overflow;          // [1]
  int64_t capacity;           // rows
  int64_t compact_capacity;
  int64_t limit;  // max_rows, or -1
  int rows_wire, compact;
  int direct;  // this rank's rows are symmetric and peers store into them
  // Who brought each row, and its place among all that it brought: the row_rank and row_token of combine and spread. [capacity],
  // or null where ranks bring no tokens but their own.
  int32_t *bringer, *place;
} a2a_moe_rows;
A2A_API int a2a_moe_dispatch(a2a_moe*, const void* x, const void* x_scales, const void* ids, int ids_bytes,
                             const void* weights, uint32_t tokens, const a2a_moe_rows* out);
// y[tokens, hidden] = sum over this rank's tokens of their rows on all ranks. With weight_grads, also carries one float a row
// home: token_weight_grads[tokens, top_k].
A2A_API int a2a_moe_combine(a2a_moe*, uint32_t request, const void* rows, int64_t num_rows, const float* weights,
                            const int32_t* row_rank, const int32_t* row_token, const int32_t* row_k,
                            const int32_t* row_index, const float* weight_grads, void* y, float* token_weight_grads,
                            uint32_t tokens);
// grad_rows[r] = weights[r] * g[token of r]; weight_grads[r] = dot(rows[r], g[token of r])
A2A_API int a2a_moe_spread(a2a_moe*, uint32_t request, const void* g, uint32_t tokens, const void* rows,
                           int64_t num_rows, const float* weights, const int32_t* row_rank, const int32_t* row_token,
                           void* grad_rows, float* weight_grads);

// --- Mixture of Experts across domains (moe_rail.cpp): local work on what crosses rails. A list names tokens, ascending; its masks
// have bit k set where the token's k-th expert is meant; pairs are the (expert, weight) of these bits, in order.
typedef struct {
  uint32_t experts, top_k, domains;
  int32_t mine;           // this rank's domain
  const int32_t* domain;  // [experts] the domain that holds it,
  const int32_t* local;   // and its index there
} a2a_moe_domains;
// lists and masks: [domains][tokens]; counts: [domains][2], tokens and pairs; own_ids: [tokens, top_k], ids within this domain,
// else -1. kInvalid: counts[0], [1] and [2] are token, k and id of one out of range (so counts has room for 3 at least).
A2A_API int a2a_moe_rail_select(const a2a_moe_domains*, const void* ids, int ids_bytes, uint32_t tokens,
                                int32_t* own_ids, int32_t* lists, uint32_t* masks, int64_t* counts);
A2A_API void a2a_moe_rail_gather(void* out, const void* in, const int32_t* list, uint32_t n, size_t row_bytes);
A2A_API void a2a_moe_rail_quantize(uint32_t dtype, uint32_t wire, const void* x, uint32_t tokens, uint32_t hidden,
                                   void* q, void* scales);
A2A_API void a2a_moe_rail_pairs(const a2a_moe_domains*, const void* ids, int ids_bytes, const float* weights,
                                const int32_t* list, const uint32_t* masks, uint32_t n, void* out_ids, int out_bytes,
                                float* out_weights);
// Packed pairs to ids_TK and weights_TK (1 where weights is null; -1 and 0 where there is no pair). kInvalid: they don't add up.
A2A_API int a2a_moe_rail_unpair(const void* ids, int ids_bytes, const float* weights, const uint32_t* masks, uint32_t n,
                                uint64_t pairs, uint32_t top_k, uint32_t experts, int32_t* ids_TK, float* weights_TK);
// One float a pair, from [.., top_k] to packed, or back (unpack). list null: 0, 1, ...
A2A_API void a2a_moe_rail_grads(float* packed, float* grads_TK, const int32_t* list, const uint32_t* masks, uint32_t n,
                                uint32_t top_k, int unpack);
typedef struct {
  const void* rows;     // the domain's sums of the tokens in `list`, one after the other; dense: of every token
  const int32_t* list;  // [tokens]
  uint32_t tokens, dense;
} a2a_moe_sums;
A2A_API void a2a_moe_rail_merge(uint32_t in_dtype, uint32_t out_dtype, uint32_t hidden, uint32_t tokens,
                                uint32_t domains, const a2a_moe_sums* sums, void* y);
// --- wire formats (Dtype and Wire of simd.h): float32, bfloat16 or float16 to and from e4m3 with block scales
A2A_API void a2a_quantize(uint32_t dtype, uint32_t wire, void* q, void* scales, const void* x, size_t count);
A2A_API void a2a_dequantize(uint32_t dtype, uint32_t wire, void* x, const void* q, const void* scales, size_t count);

// --- custom calls of programs that XLA compiles (jax_ffi.cpp, jax_ranks.cpp)
A2A_API int64_t a2a_jax_connect(a2a_context*);          // what programs call this communicator, until
A2A_API void a2a_jax_disconnect(int64_t communicator);  // which comes before a2a_close
// For XLA's registry: handlers, each from an XLA_FFI_CallFrame to an XLA_FFI_Error; an XLA_FFI_TypeId and an XLA_FFI_TypeInfo.
A2A_API void* a2a_jax_instantiate(void* call_frame);
A2A_API void* a2a_jax_execute(void* call_frame);
A2A_API void* a2a_jax_site_type(void);
A2A_API void* a2a_jax_site_info(void);

// --- pools: blocks of a segment that are handed out as tensors and come back through a DLPack deleter
typedef struct a2a_pool a2a_pool;
A2A_API a2a_pool* a2a_pool_create(void* map, size_t map_bytes, void* mine, size_t mine_bytes);
A2A_API a2a_pool* a2a_pool_private(size_t bytes);  // null on failure
A2A_API a2a_pool* a2a_pool_child(a2a_pool* parent, void* block, size_t bytes);
A2A_API void* a2a_pool_take(a2a_pool*, size_t bytes);  // null when full
A2A_API void a2a_pool_shrink(a2a_pool*, void* p, size_t bytes);
A2A_API void a2a_pool_give(a2a_pool*, void* p);
A2A_API void* a2a_pool_dlpack(a2a_pool*, void* p,
                              size_t bytes);  // a DLManagedTensor of uint8; its deleter gives p back
A2A_API void* a2a_pool_take_at(a2a_pool*, size_t offset, size_t bytes);
A2A_API int a2a_pool_holds(a2a_pool*, size_t offset);
A2A_API void a2a_pool_close(a2a_pool*);  // unmaps once the last block is back

// --- CUDA: loading and launching kernels through the driver (cuda_launch.cpp). Results are the driver's CUresult; 0 is success.
A2A_API int a2a_cuda_open(void);  // finds libcuda.so.1; before all else here
A2A_API const char* a2a_cuda_error(int error);
A2A_API int a2a_cuda_load(const void* cubin, void** module);  // into the current context
A2A_API int a2a_cuda_unload(void* module);
A2A_API int a2a_cuda_function(void* module, const char* name, uint32_t shared_bytes, void** function);
A2A_API int a2a_cuda_constant(void* module, const char* name,
                              uint64_t* value);  // of a 64-bit variable; waits for the device
typedef struct {                                 // a launch, prepared: a foreign-function call pays for every argument
  void *function, *context;
  const volatile uint64_t* failure;  // null, or not 0: launch nothing
  const void* params;                // the kernel's one parameter, by value; its first two words are replaced
  uint32_t params_bytes, grid, block, shared_bytes;
  uint32_t cluster;       // blocks of a cluster; 0 or 1: none
  uint32_t programmatic;  // 1: may start before the stream's earlier kernel has ended
} a2a_cuda_call;
A2A_API int a2a_cuda_launch(const a2a_cuda_call*, void* stream, uint64_t first,
                            uint64_t second);  // -1: *failure is set

// Several launches and copies, on several streams: what one collective of more than one kernel is.
enum { A2A_CUDA_LAUNCH = 0, A2A_CUDA_RECORD = 1, A2A_CUDA_WAIT = 2, A2A_CUDA_COPY = 3 };
typedef struct {
  uint32_t kind, stream;                     // which of `streams`
  void* what;                                // a2a_cuda_call, or an event; a copy: where to
  uint32_t patch_at, patch_words, patch[6];  // words that replace the parameters' from that byte on; a copy: two 64-bit
                                             // words, where from and how many bytes
} a2a_cuda_step;
A2A_API int a2a_cuda_run(const a2a_cuda_step* steps, uint32_t count, void* const* streams);
A2A_API int a2a_cuda_event(void** event);
A2A_API int a2a_cuda_event_free(void* event);
A2A_API int a2a_cuda_stream_context(void* stream, void** context);  // null where the driver can't tell
// Wait until a kernel has stored `wanted` to pinned memory. -1: *failure is set; -2: not within the time.
A2A_API int a2a_cuda_await(const volatile uint64_t* word, uint64_t wanted, const volatile uint64_t* failure,
                           double seconds);

// --- custom calls of programs that XLA compiles for GPUs (jax_cuda.cpp)
typedef struct {
  uint64_t in_bytes, out_bytes;
  uint64_t row_bytes;  // 0 where it isn't ragged
  int ragged;
} a2a_jax_cuda_shape;
// What programs call this communicator, < 0, until a2a_jax_cuda_disconnect; 0: no memory. Its calls are ordered by the event.
A2A_API int64_t a2a_jax_cuda_connect(uint32_t world, uint32_t rank, double timeout_s, void* event);
// What programs call this launch, > 0; it is copied, its parameters too, which begin with out, in and, ragged, the four lists.
A2A_API int64_t a2a_jax_cuda_prepare(int64_t communicator, const a2a_jax_cuda_shape*, const a2a_cuda_call*);
A2A_API void a2a_jax_cuda_disconnect(int64_t communicator);
A2A_API void* a2a_jax_cuda_execute(void* call_frame);
