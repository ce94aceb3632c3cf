// A libnvidia-ml.so.1 that answers as GPUs of each generation do, in NVML's own structures (nvml.h).
//
// `stub_use` says which cards there are; a value comes with the code that its function returns. A whole GPU's value that
// is asked of a MIG instance is an invalid argument, as is a device of another session.

#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, NO_FUNCTION = 13, WRONG_VERSION = 25 };
enum { MAX_CARDS = 16, MAX_MIG = 2, COUNTERS = 4 };

typedef struct {
  int code;
  long long value;
} reading;
typedef struct {
  char name[96], uuid[96], mig[MAX_MIG][96];
  int migs, major, minor, old_driver;
  reading gpu, used, total, power, limit, temperature, sm_clock, mem_clock, reasons, gpm;
  int counter_ids[COUNTERS], counter_codes[COUNTERS];
  double counters[COUNTERS];
} card;
typedef struct {
  card* card;
  int mig;  // -1 for the whole GPU
} device;
typedef struct {
  card* card;  // NULL until something was sampled
  int instance;
} sample;
typedef struct {
  unsigned id;
  int code;
  double value;
  const char *short_name, *long_name, *unit;
} metric;
typedef struct {
  unsigned version, count;
  sample *first, *second;
  metric metrics[];
} metrics_get;

static card cards[MAX_CARDS];
static device devices[MAX_CARDS][MAX_MIG + 1];
static int there, sessions, init_code, lost, buffers;

int stub_card_size(void) { return sizeof(card); }
int stub_buffers(void) { return buffers; }
void stub_lose(int code) { lost = code; }
void stub_use(const card* of, int count, int code) {
  memcpy(cards, of, count * sizeof(card));
  there = count, init_code = code, lost = 0, sessions = 0, buffers = 0;
  for (int i = 0; i < count; i++)
    for (int m = 0; m <= MAX_MIG; m++) devices[i][m] = (device){&cards[i], m - 1};
}

#define SESSION \
  if (!sessions) return UNINITIALIZED; \
  if (lost) return lost
#define WHOLE(d) \
  SESSION; \
  if (!(d) || (d)->mig >= 0) return INVALID
#define GIVE(field, into) \
  do { \
    if (d->card->field.code) return d->card->field.code; \
    *(into) = d->card->field.value; \
    return OK; \
  } while (0)

int nvmlInitWithFlags(unsigned flags) { return init_code ? init_code : (sessions++, OK); }
int nvmlShutdown(void) { return sessions ? (sessions--, OK) : UNINITIALIZED; }
int nvmlSystemGetDriverVersion(char* into, unsigned length) {
  SESSION;
  strncpy(into, "580.65.06", length);
  return OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int* into) {
  SESSION;
  *into = 13000;
  return OK;
}
int nvmlDeviceGetCount_v2(unsigned* into) {
  SESSION;
  *into = there;
  return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device** into) {
  SESSION;
  if ((int)index >= there) return INVALID;
  *into = &devices[index][0];
  return OK;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, device** into) {
  SESSION;
  for (int i = 0; i < there; i++) {
    if (!strcmp(uuid, cards[i].uuid)) return *into = &devices[i][0], OK;
    for (int m = 0; m < cards[i].migs; m++)
      if (!strcmp(uuid, cards[i].mig[m])) return *into = &devices[i][m + 1], OK;
  }
  return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* address, device** into) {
  SESSION;
  const char* bus = strchr(address, ':');
  unsigned place = bus ? strtoul(bus + 1, NULL, 16) : there;
  if ((int)place >= there) return NOT_FOUND;
  *into = &devices[place][0];
  return OK;
}

int nvmlDeviceGetName(device* d, char* into, unsigned length) {
  SESSION;
  strncpy(into, d->card->name, length);
  return OK;
}
int nvmlDeviceGetUUID(device* d, char* into, unsigned length) {
  SESSION;
  strncpy(into, d->mig < 0 ? d->card->uuid : d->card->mig[d->mig], length);
  return OK;
}
int nvmlDeviceGetCudaComputeCapability(device* d, int* major, int* minor) {
  SESSION;
  *major = d->card->major, *minor = d->card->minor;
  return OK;
}
int nvmlDeviceIsMigDeviceHandle(device* d, unsigned* into) {
  SESSION;
  *into = d->mig >= 0;
  return OK;
}
int nvmlDeviceGetMigMode(device* d, unsigned* now, unsigned* pending) {
  WHOLE(d);
  if (!d->card->migs) return NOT_SUPPORTED;
  *now = *pending = 1;
  return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(device* d, unsigned* into) {
  WHOLE(d);
  *into = 7;
  return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(device* d, unsigned index, device** into) {
  WHOLE(d);
  if ((int)index >= d->card->migs) return NOT_FOUND;
  *into = d + 1 + index;
  return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device* d, device** into) {
  SESSION;
  if (d->mig < 0) return INVALID;
  *into = d - d->mig - 1;
  return OK;
}
int nvmlDeviceGetGpuInstanceId(device* d, unsigned* into) {
  SESSION;
  if (d->mig < 0) return INVALID;
  *into = 3 + d->mig;
  return OK;
}

int nvmlDeviceGetUtilizationRates(device* d, unsigned* into) {  // gpu, memory
  WHOLE(d);
  into[1] = 12;
  GIVE(gpu, into);
}
static int memory(device* d, unsigned long long* total, unsigned long long* used) {
  SESSION;
  if (d->card->total.code) return d->card->total.code;
  int share = d->mig < 0 ? 1 : 7;
  *total = d->card->total.value / share, *used = d->card->used.value / share;
  return OK;
}
int nvmlDeviceGetMemoryInfo(device* d, unsigned long long* into) {  // total, free, used
  return memory(d, into, into + 2);
}
typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} memory_v2;
int nvmlDeviceGetMemoryInfo_v2(device* d, memory_v2* into) {
  SESSION;
  if (d->card->old_driver) return NO_FUNCTION;
  if (into->version != (sizeof(memory_v2) | 2u << 24)) return WRONG_VERSION;
  return memory(d, &into->total, &into->used);
}
int nvmlDeviceGetPowerUsage(device* d, unsigned* into) {
  WHOLE(d);
  GIVE(power, into);
}
int nvmlDeviceGetEnforcedPowerLimit(device* d, unsigned* into) {
  WHOLE(d);
  GIVE(limit, into);
}
typedef struct {
  unsigned version, sensor;
  int temperature;
} temperature_v1;
int nvmlDeviceGetTemperatureV(device* d, temperature_v1* into) {
  WHOLE(d);
  if (d->card->old_driver) return NO_FUNCTION;
  if (into->version != (sizeof(temperature_v1) | 1u << 24)) return WRONG_VERSION;
  if (into->sensor != 0) return INVALID;
  GIVE(temperature, &into->temperature);
}
int nvmlDeviceGetTemperature(device* d, int sensor, unsigned* into) {
  WHOLE(d);
  GIVE(temperature, into);
}
int nvmlDeviceGetClockInfo(device* d, int kind, unsigned* into) {  // 1 is the SMs', 2 the memory's
  WHOLE(d);
  if (kind == 1) GIVE(sm_clock, into);
  if (kind == 2) GIVE(mem_clock, into);
  return INVALID;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device* d, unsigned long long* into) {
  WHOLE(d);
  GIVE(reasons, into);
}
int nvmlDeviceGetCurrentClocksEventReasons(device* d, unsigned long long* into) {
  WHOLE(d);
  if (d->card->old_driver) return NO_FUNCTION;
  GIVE(reasons, into);
}

int nvmlGpmQueryDeviceSupport(device* d, unsigned* into) {  // version, supported
  WHOLE(d);
  if (into[0] != 1) return WRONG_VERSION;
  GIVE(gpm, into + 1);
}
int nvmlGpmSampleAlloc(sample** into) {
  SESSION;
  *into = calloc(1, sizeof(sample));
  buffers++;
  return OK;
}
int nvmlGpmSampleFree(sample* s) {
  free(s);
  buffers--;
  return OK;
}
int nvmlGpmSampleGet(device* d, sample* into) {
  WHOLE(d);
  if (d->card->migs) return NOT_SUPPORTED;  // in MIG mode there are samples of instances alone
  *into = (sample){d->card, -1};
  return OK;
}
int nvmlGpmMigSampleGet(device* d, unsigned instance, sample* into) {
  WHOLE(d);
  if ((int)instance < 3 || (int)instance >= 3 + d->card->migs) return INVALID;
  *into = (sample){d->card, instance};
  return OK;
}
int nvmlGpmMetricsGet(metrics_get* request) {
  SESSION;
  if (request->version != 1) return WRONG_VERSION;
  if (!request->first || !request->second || !request->first->card) return INVALID;
  if (request->first->card != request->second->card || request->first->instance != request->second->instance)
    return INVALID;
  card* from = request->second->card;
  for (unsigned i = 0; i < request->count; i++) {
    metric* asked = &request->metrics[i];
    asked->code = NOT_SUPPORTED;
    for (int k = 0; k < COUNTERS; k++)
      if (from->counter_ids[k] == (int)asked->id) asked->code = from->counter_codes[k], asked->value = from->counters[k];
  }
  return OK;
}
