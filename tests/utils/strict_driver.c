/* CUDA's virtual memory management as its documentation has it, on host memory: every argument that the driver would refuse is
   refused here. For machines without a GPU; declared by the real cuda.h. */
#define _GNU_SOURCE
#include <cuda.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULE (2ull << 20)
#define MOST 4096

typedef struct { size_t size; int handles, mappings; } Memory;
typedef struct { CUdeviceptr at; size_t size; int memory; } Mapping;
typedef struct { CUdeviceptr at; size_t size; } Reservation;

static Memory memories[MOST];
static Mapping mappings[MOST];
static Reservation reservations[MOST];
static int created;
static size_t limit = ~(size_t)0;

size_t strict_used(void) {
    size_t sum = 0;
    for (int i = 1; i <= created; i++)
        if (memories[i].handles || memories[i].mappings) sum += memories[i].size;
    return sum;
}

size_t strict_reserved(void) {
    size_t sum = 0;
    for (int i = 0; i < MOST; i++) sum += reservations[i].size;
    return sum;
}

void strict_limit(size_t bytes) { limit = bytes; }

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : NULL;
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (attribute != CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) return CUDA_ERROR_INVALID_VALUE;
    *value = device == 0; /* device 1 is an old one */
    return CUDA_SUCCESS;
}

static int usual(const CUmemAllocationProp *kind) {
    static const unsigned char nothing[sizeof kind->allocFlags];
    return kind->type == CU_MEM_ALLOCATION_TYPE_PINNED && kind->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE &&
           kind->location.type == CU_MEM_LOCATION_TYPE_DEVICE && kind->location.id == 0 && !kind->win32HandleMetaData &&
           !memcmp(&kind->allocFlags, nothing, sizeof nothing);
}

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *kind, CUmemAllocationGranularity_flags which) {
    if (!usual(kind) || which != CU_MEM_ALLOC_GRANULARITY_MINIMUM) return CUDA_ERROR_INVALID_VALUE;
    *size = GRANULE;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    if (!size || size % GRANULE || (alignment & (alignment - 1)) || hint || flags) return CUDA_ERROR_INVALID_VALUE;
    char *place = mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    if (alignment) place += (alignment - (size_t)place % alignment) % alignment;
    for (int i = 0; i < MOST; i++)
        if (!reservations[i].size) {
            reservations[i] = (Reservation){(CUdeviceptr)place, size};
            *at = (CUdeviceptr)place;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (mappings[i].size && mappings[i].at >= at && mappings[i].at < at + size) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MOST; i++)
        if (reservations[i].size == size && reservations[i].at == at) {
            munmap((void *)at, size);
            reservations[i].size = 0;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *kind,
                     unsigned long long flags) {
    if (!size || size % GRANULE || flags || !usual(kind) || created + 1 == MOST) return CUDA_ERROR_INVALID_VALUE;
    if (strict_used() + size > limit) return CUDA_ERROR_OUT_OF_MEMORY;
    memories[++created] = (Memory){size, 1, 0};
    *handle = created;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    if (handle < 1 || handle > (unsigned)created || !memories[handle].handles) return CUDA_ERROR_INVALID_VALUE;
    memories[handle].handles--;
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    int inside = 0, spare = -1;
    if (handle < 1 || handle > (unsigned)created || !memories[handle].handles) return CUDA_ERROR_INVALID_VALUE;
    if (offset || flags || at % GRANULE || size != memories[handle].size) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < MOST; i++) {
        inside |= reservations[i].size && at >= reservations[i].at && at + size <= reservations[i].at + reservations[i].size;
        if (!mappings[i].size) spare = i;
        else if (at < mappings[i].at + mappings[i].size && mappings[i].at < at + size) return CUDA_ERROR_INVALID_VALUE;
    }
    if (!inside || spare < 0) return CUDA_ERROR_INVALID_VALUE;
    mappings[spare] = (Mapping){at, size, (int)handle};
    memories[handle].mappings++;
    return CUDA_SUCCESS;
}

static Mapping *mapping_at(CUdeviceptr at, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (mappings[i].size == size && mappings[i].at == at && size) return &mappings[i];
    return NULL;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *access, size_t count) {
    if (!mapping_at(at, size) || count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE ||
        access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || access->location.id != 0)
        return CUDA_ERROR_INVALID_VALUE;
    mprotect((void *)at, size, PROT_READ | PROT_WRITE);
    memset((void *)at, 0xa5, 64); /* fresh memory is no zeros here */
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    Mapping *found = mapping_at(at, size);
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    madvise((void *)at, size, MADV_DONTNEED);
    mprotect((void *)at, size, PROT_NONE);
    memories[found->memory].mappings--;
    found->size = 0;
    return CUDA_SUCCESS;
}

#define FIELD(type, field) printf("%s.%s %zu\n", #type, #field, offsetof(type, field))
#define NUMBER(name) printf("%s %d\n", #name, (int)(name))

int main(void) { /* what Python has to agree with */
    printf("CUmemLocation %zu\nCUmemAllocationProp %zu\nCUmemAccessDesc %zu\nCUmemGenericAllocationHandle %zu\nCUdeviceptr %zu\n",
           sizeof(CUmemLocation), sizeof(CUmemAllocationProp), sizeof(CUmemAccessDesc), sizeof(CUmemGenericAllocationHandle),
           sizeof(CUdeviceptr));
    FIELD(CUmemLocation, type); FIELD(CUmemLocation, id);
    FIELD(CUmemAllocationProp, type); FIELD(CUmemAllocationProp, requestedHandleTypes);
    FIELD(CUmemAllocationProp, location); FIELD(CUmemAllocationProp, win32HandleMetaData);
    FIELD(CUmemAllocationProp, allocFlags); FIELD(CUmemAllocationProp, allocFlags.compressionType);
    FIELD(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable); FIELD(CUmemAllocationProp, allocFlags.usage);
    FIELD(CUmemAllocationProp, allocFlags.reserved);
    FIELD(CUmemAccessDesc, location); FIELD(CUmemAccessDesc, flags);
    NUMBER(CU_MEM_ALLOCATION_TYPE_PINNED); NUMBER(CU_MEM_LOCATION_TYPE_DEVICE); NUMBER(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    NUMBER(CU_MEM_ALLOC_GRANULARITY_MINIMUM); NUMBER(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    NUMBER(CUDA_ERROR_OUT_OF_MEMORY);
    return 0;
}
