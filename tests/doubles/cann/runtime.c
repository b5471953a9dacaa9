/* A recording stand-in for Huawei's CANN at its C boundary, so that the real torch_npu can be loaded
 * and profiled on a machine without it. It computes nothing: memory is the host's, streams and events
 * are done at once, operators are refused. Every call about profiling and every MSTX call becomes one
 * line of JSON in the file that CANN_DOUBLE_LOG names, by one write(2), so that no process and no
 * thread cuts another's line. CANN_DOUBLE_DEVICES says how many NPUs there seem to be, and with
 * CANN_DOUBLE_PROF=1 profiling leaves the folders that msprof.py works on.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))
enum { NO_CONTEXT = 107002, BAD_DEVICE = 107001, NO_MEMORY = 207001, UNSUPPORTED = 200006 };

static long long nanoseconds(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void append(const char *path, const char *text) {
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) return;
  if (write(file, text, strlen(text)) < 0) perror(path);
  close(file);
}

static void quoted(char *out, size_t size, const char *text) {
  size_t used = 0;
  for (; text && *text && used + 7 < size; text++) {
    unsigned char byte = (unsigned char)*text;
    if (byte == '"' || byte == '\\') used += sprintf(out + used, "\\%c", byte);
    else if (byte < 32) used += sprintf(out + used, "\\u%04x", byte);
    else out[used++] = (char)byte;
  }
  out[used] = 0;
}

static char ranges_file[4200]; /* MSTX calls also go here while a profiler runs: msprof reads it */

/* note("aclprofStart", "\"mask\":%llu", mask): a call and what it was given. */
static void note(const char *call, const char *format, ...) {
  char rest[6000], line[6400];
  va_list values;
  va_start(values, format);
  vsnprintf(rest, sizeof rest, format, values);
  va_end(values);
  snprintf(line, sizeof line, "{\"call\":\"%s\",\"pid\":%d,\"tid\":%ld,\"unix_ns\":%lld%s%s}\n", call,
           getpid(), (long)syscall(SYS_gettid), nanoseconds(CLOCK_REALTIME), *rest ? "," : "", rest);
  if (getenv("CANN_DOUBLE_LOG")) append(getenv("CANN_DOUBLE_LOG"), line);
  if (!strncmp(call, "mstx", 4) && *ranges_file) append(ranges_file, line);
}

/* ---- devices, memory, streams, events ---- */

static int devices(void) {
  const char *count = getenv("CANN_DOUBLE_DEVICES");
  return count ? atoi(count) : 0;
}
static __thread int device = -1;
static int contexts[64];
static void *handle(void) { return calloc(1, 64); }

PUBLIC int aclInit(const char *file) { (void)file; note("aclInit", ""); return 0; }
PUBLIC int aclFinalize(void) { note("aclFinalize", ""); return 0; }
PUBLIC const char *aclGetRecentErrMsg(void) { return "the CANN double has no more to say"; }
PUBLIC const char *aclrtGetSocName(void) { return "Ascend910B1"; }
PUBLIC int aclrtGetDeviceCount(uint32_t *count) { *count = (uint32_t)devices(); return 0; }
PUBLIC int aclrtSetDevice(int32_t number) {
  if (number < 0 || number >= devices()) return BAD_DEVICE;
  device = number;
  note("aclrtSetDevice", "\"device\":%d", number);
  return 0;
}
PUBLIC int aclrtGetDevice(int32_t *number) { *number = device; return device < 0 ? NO_CONTEXT : 0; }
PUBLIC int aclrtGetCurrentContext(void **context) {
  if (device < 0) return NO_CONTEXT;
  *context = &contexts[device];
  return 0;
}
PUBLIC int aclrtSetCurrentContext(void *context) { device = (int)((int *)context - contexts); return 0; }
PUBLIC int aclrtCreateStream(void **stream) { *stream = handle(); return 0; }
PUBLIC int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
  (void)priority, (void)flags;
  return aclrtCreateStream(stream);
}
PUBLIC int aclrtDestroyStream(void *stream) { free(stream); return 0; }
PUBLIC int aclrtDestroyStreamForce(void *stream) { free(stream); return 0; }
PUBLIC int aclrtStreamQuery(void *stream, int *status) { (void)stream; *status = 0; return 0; }
PUBLIC int aclrtStreamGetId(void *stream, int32_t *id) { *id = stream ? 1 : 0; return 0; }
PUBLIC int aclrtCreateEvent(void **event) { *event = handle(); return 0; }
PUBLIC int aclrtCreateEventWithFlag(void **event, uint32_t flag) { (void)flag; return aclrtCreateEvent(event); }
PUBLIC int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { (void)flag; return aclrtCreateEvent(event); }
PUBLIC int aclrtDestroyEvent(void *event) { free(event); return 0; }
PUBLIC int aclrtRecordEvent(void *event, void *stream) {
  (void)stream;
  if (event) *(long long *)event = nanoseconds(CLOCK_MONOTONIC);
  return 0;
}
PUBLIC int aclrtQueryEventStatus(void *event, int *status) { (void)event; *status = 1; return 0; }
PUBLIC int aclrtQueryEventWaitStatus(void *event, int *status) { (void)event; *status = 0; return 0; }
PUBLIC int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
  *milliseconds = (float)((*(long long *)end - *(long long *)start) / 1e6);
  return 0;
}
PUBLIC int aclrtMalloc(void **memory, size_t size, int policy) {
  (void)policy;
  return posix_memalign(memory, 512, size ? size : 512) ? NO_MEMORY : 0;
}
PUBLIC int aclrtMallocAlign32(void **memory, size_t size, int policy) { return aclrtMalloc(memory, size, policy); }
PUBLIC int aclrtMallocHost(void **memory, size_t size) { return aclrtMalloc(memory, size, 0); }
PUBLIC int aclrtFree(void *memory) { free(memory); return 0; }
PUBLIC int aclrtFreeHost(void *memory) { free(memory); return 0; }
PUBLIC int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
  (void)room, (void)kind;
  memmove(to, from, size);
  return 0;
}
PUBLIC int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
  (void)stream;
  return aclrtMemcpy(to, room, from, size, kind);
}
PUBLIC int aclrtMemset(void *memory, size_t room, int32_t value, size_t size) {
  (void)room;
  memset(memory, value, size);
  return 0;
}
PUBLIC int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) {
  (void)kind;
  *free_bytes = 32ull << 30, *total = 64ull << 30;
  return 0;
}
PUBLIC int aclGetDeviceCapability(uint32_t number, int what, int64_t *value) { (void)number, (void)what; *value = 0; return 0; }
PUBLIC int aclrtDeviceCanAccessPeer(int32_t *can, int32_t one, int32_t other) { (void)one, (void)other; *can = 1; return 0; }
PUBLIC int aclrtDeviceGetBareTgid(int32_t *pid) { *pid = getpid(); return 0; }
PUBLIC int aclrtGetSysParamOpt(int what, int64_t *value) { (void)what; *value = 0; return 0; }
PUBLIC int aclrtCtxGetSysParamOpt(int what, int64_t *value) { (void)what; *value = 0; return 0; }
PUBLIC int aclrtProcessReport(int32_t timeout) { (void)timeout; usleep(1000); return 0; }

/* ---- aclprof: what is asked for is noted, and the folders that msprof works on are made ---- */

struct profile { uint32_t device; int metrics; uint64_t mask; };
static char output[4096];

static void make(const char *folder, const char *below) {
  char path[8300];
  snprintf(path, sizeof path, "%s/%s", folder, below);
  mkdir(path, 0750);
}
static void make_output(uint32_t number) {
  char folder[4160], path[4260], text[400], below[40];
  const char *collects = getenv("CANN_DOUBLE_PROF");
  if (!collects || strcmp(collects, "1")) return; /* as a CANN that does not start to profile */
  snprintf(folder, sizeof folder, "%s/PROF_000001_20260101000000000_DOUBLE%d", output, getpid());
  snprintf(below, sizeof below, "device_%u", number);
  make(folder, ""), make(folder, "host"), make(folder, "host/data"), make(folder, below);
  snprintf(ranges_file, sizeof ranges_file, "%s/host/data/double.jsonl", folder);
  long long unix_us = nanoseconds(CLOCK_REALTIME) / 1000;
  snprintf(path, sizeof path, "%s/host/start_info", folder);
  snprintf(text, sizeof text, "{\"collectionTimeBegin\": \"%lld\", \"clockMonotonicRaw\": \"%lld\"}", unix_us,
           nanoseconds(CLOCK_MONOTONIC_RAW));
  append(path, text);
  snprintf(path, sizeof path, "%s/host/info.json", folder);
  snprintf(text, sizeof text, "{\"double\": true, \"hwtype\": \"none\", \"pid\": \"%d\", \"pid_name\": \"python\", "
           "\"CPU\": [{\"Frequency\": \"100.000000\"}]}", getpid());
  append(path, text);
}
PUBLIC int aclprofInit(const char *path, size_t size) {
  snprintf(output, sizeof output, "%.*s", (int)size, path);
  note("aclprofInit", "");
  return 0;
}
PUBLIC int aclprofFinalize(void) { note("aclprofFinalize", ""); return 0; }
PUBLIC struct profile *aclprofCreateConfig(uint32_t *numbers, uint32_t count, int metrics, const void *events, uint64_t mask) {
  struct profile *made = calloc(1, sizeof *made);
  (void)count, (void)events;
  made->device = numbers[0], made->metrics = metrics, made->mask = mask;
  note("aclprofCreateConfig", "\"device\":%u,\"metrics\":%d,\"mask\":%llu", numbers[0], metrics, (unsigned long long)mask);
  return made;
}
PUBLIC int aclprofDestroyConfig(struct profile *made) { free(made); return 0; }
PUBLIC int aclprofSetConfig(int type, const char *text, size_t size) {
  char copy[300], safe[700];
  snprintf(copy, sizeof copy, "%.*s", (int)size, text);
  quoted(safe, sizeof safe, copy);
  note("aclprofSetConfig", "\"type\":%d,\"value\":\"%s\"", type, safe);
  return 0;
}
PUBLIC int aclprofWarmup(const struct profile *made) { note("aclprofWarmup", "\"mask\":%llu", (unsigned long long)made->mask); return 0; }
PUBLIC int aclprofStart(const struct profile *made) {
  make_output(made->device);
  note("aclprofStart", "\"mask\":%llu", (unsigned long long)made->mask);
  return 0;
}
PUBLIC int aclprofStop(const struct profile *made) {
  note("aclprofStop", "\"mask\":%llu", (unsigned long long)made->mask);
  *ranges_file = 0;
  return 0;
}
PUBLIC int aclprofGetSupportedFeatures(size_t *size, void **features) { *size = 0, *features = NULL; return 0; }
PUBLIC int aclprofGetSupportedFeaturesV2(size_t *size, void **features) { return aclprofGetSupportedFeatures(size, features); }
PUBLIC uint64_t MsprofSysCycleTime(void) { return (uint64_t)nanoseconds(CLOCK_MONOTONIC); }
PUBLIC uint64_t MsprofGetHashId(const char *text, size_t size) {
  uint64_t hash = 5381;
  while (size--) hash = hash * 33 + (unsigned char)*text++;
  return hash;
}

/* ---- MSTX ---- */

struct domain { char name[200]; };
static struct domain usual = {"default"};
static uint64_t started;

static void marked(const char *call, const struct domain *in, const char *message, const void *stream, uint64_t id) {
  char safe[3000], name[500];
  quoted(safe, sizeof safe, message);
  quoted(name, sizeof name, in->name);
  note(call, "\"domain\":\"%s\",\"message\":\"%s\",\"stream\":%s,\"id\":%llu", name, safe,
       stream ? "true" : "false", (unsigned long long)id);
}
PUBLIC struct domain *mstxDomainCreateA(const char *name) {
  struct domain *made = calloc(1, sizeof *made);
  snprintf(made->name, sizeof made->name, "%s", name);
  return made;
}
PUBLIC void mstxDomainDestroy(struct domain *made) { free(made); }
PUBLIC void mstxDomainMarkA(struct domain *in, const char *message, void *stream) { marked("mstxMark", in, message, stream, 0); }
PUBLIC void mstxMarkA(const char *message, void *stream) { mstxDomainMarkA(&usual, message, stream); }
PUBLIC uint64_t mstxDomainRangeStartA(struct domain *in, const char *message, void *stream) {
  uint64_t id = __sync_add_and_fetch(&started, 1);
  marked("mstxRangeStart", in, message, stream, id);
  return id;
}
PUBLIC uint64_t mstxRangeStartA(const char *message, void *stream) { return mstxDomainRangeStartA(&usual, message, stream); }
PUBLIC void mstxDomainRangeEnd(struct domain *in, uint64_t id) {
  note("mstxRangeEnd", "\"domain\":\"%s\",\"id\":%llu", in->name, (unsigned long long)id);
}
PUBLIC void mstxRangeEnd(uint64_t id) { mstxDomainRangeEnd(&usual, id); }

/* ---- the rest: done without doing anything, a new handle, or refused ---- */

#define DONE(name) PUBLIC int name(void) { return 0; }
#define MADE(name) PUBLIC void *name(void) { return handle(); }
#define REFUSED(name) PUBLIC int name(void) { note(#name, "\"refused\":%d", UNSUPPORTED); return UNSUPPORTED; }
PUBLIC void aclAppLog(void) {}
DONE(aclSetCompileopt) DONE(aclrtCtxSetSysParamOpt) DONE(aclrtDeviceEnablePeerAccess) DONE(aclrtResetDevice)
DONE(aclrtResetEvent) DONE(aclrtSetDeviceSatMode) DONE(aclrtSetOpExecuteTimeOut) DONE(aclrtSetSysParamOpt)
DONE(aclrtSetStreamOverflowSwitch)  /* torch_npu 2.6 */
DONE(aclrtStreamWaitEvent) DONE(aclrtSynchronizeDevice) DONE(aclrtSynchronizeDeviceWithTimeout)
DONE(aclrtSynchronizeEvent) DONE(aclrtSynchronizeStream) DONE(aclrtSynchronizeStreamWithTimeout)
DONE(aclprofMarkEx) DONE(aclprofRegisterDeviceCallback) DONE(aclprofDestroyStepInfo) DONE(aclprofGetStepTimestamp)
DONE(MsprofRegisterCallback) DONE(MsprofReportAdditionalInfo) DONE(MsprofReportApi) DONE(MsprofReportCompactInfo)
DONE(aclDestroyDataBuffer) DONE(aclDestroyTensorDesc) DONE(aclGetTensorDescDimV2) DONE(aclGetTensorDescFormat)
DONE(aclGetTensorDescNumDims) DONE(aclGetTensorDescType) DONE(aclSetTensorDescName) DONE(aclSetTensorFormat)
DONE(aclSetTensorPlaceMent) DONE(aclSetTensorShape) DONE(aclopDestroyAttr) DONE(aclopSetAttrBool)
DONE(aclopSetAttrDataType) DONE(aclopSetAttrFloat) DONE(aclopSetAttrInt) DONE(aclopSetAttrListBool)
DONE(aclopSetAttrListFloat) DONE(aclopSetAttrListInt) DONE(aclopSetAttrListListInt) DONE(aclopSetAttrString)
MADE(aclCreateDataBuffer) MADE(aclCreateTensorDesc) MADE(aclopCreateAttr) MADE(aclprofCreateStepInfo)
REFUSED(aclmdlFinalizeDump) REFUSED(aclmdlInitDump) REFUSED(aclmdlSetDump) REFUSED(aclopCompileAndExecute)
REFUSED(aclrtBinaryGetFunction) REFUSED(aclrtBinaryLoadFromData) REFUSED(aclrtFreePhysical)
REFUSED(aclrtGetFunctionAddr) REFUSED(aclrtMallocPhysical) REFUSED(aclrtMapMem)
REFUSED(aclrtMemExportToShareableHandle) REFUSED(aclrtMemImportFromShareableHandle)
REFUSED(aclrtMemSetPidToShareableHandle) REFUSED(aclrtReleaseMemAddress) REFUSED(aclrtReserveMemAddress)
REFUSED(aclrtUnmapMem) REFUSED(rtDevBinaryRegister) REFUSED(rtFunctionRegister) REFUSED(rtGetC2cCtrlAddr)
REFUSED(rtKernelLaunch)
