/* Shows libfabric's TCP provider under the name "efa".
 *
 * Loaded with LD_PRELOAD before a program that branches on the provider's name,
 * as NIXL's LIBFABRIC plugin does: several NICs on PCI, device memory (FI_HMEM),
 * endpoint options that only EFA knows.  Everything behind the name is TCP, so
 * this emulates EFA's presence, not its behaviour: no unordered delivery, no
 * receiver-not-ready, no limits, no dma-buf, no speed.
 *
 * How it works
 *   fi_getinfo   asks for "tcp" where the caller asks for "efa" or for anything,
 *                and returns one copy of the answer per emulated NIC
 *   fi_fabric    opens the TCP fabric and replaces its "open domain" operation
 *   domain       gets the TCP provider's own fi_info back, and replaces the
 *                operations "open endpoint" and "register memory"
 *   endpoint     replaces "set option", because TCP refuses EFA's options, and the
 *                posting operations, see below
 *   register     declares device memory as host memory, which it is here
 *
 * EFA has no connections and its NICs work without the program's help, so that its
 * "try again" always ends.  TCP's does not: while NIXL tries again on one NIC, for
 * ever, the connections of its others make no progress, and two sides can wait for
 * each other; and a connection to a dead process never comes about.  Hence "try
 * again" lets all completion queues progress here, and after PATIENCE seconds of it
 * a post fails.
 *
 * Operation tables are patched in place, because the provider compares a domain's
 * table with the address of its own.  It has several kinds of each object, each
 * with its own table, and some open others inside: the original functions are
 * remembered per table.
 *
 * libfabric's compatibility functions for old callers (symbol versions) call the
 * newest ones by name and so come back here; a thread-local depth tells these
 * calls, which must pass through, from the program's own.
 *
 * Environment: KVT_FAKE_EFA_NICS (1 to 4, default 4); KVT_FAKE_EFA_TRACE=1
 * prints each memory registration's interface to stderr.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <pthread.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* What NIXL's plugin links against, and what libfabric 2 calls inside. */
#define CALLERS_ABI "FABRIC_1.7"
#define NEWEST_ABI "FABRIC_1.9"

struct nic {
    const char *name;
    uint8_t bus;
};

static const struct nic NICS[] = {
    {"rdmap16s27-rdm", 0x10},
    {"rdmap32s27-rdm", 0x20},
    {"rdmap144s27-rdm", 0x90},
    {"rdmap160s27-rdm", 0xa0},
};
static const uint8_t PCI_DEVICE = 0x1b;
static const double PATIENCE = 1.0;
static const uint64_t LINK_SPEED = 100ull * 1000 * 1000 * 1000;

typedef int (*getinfo_fn)(uint32_t, const char *, const char *, uint64_t,
                          const struct fi_info *, struct fi_info **);
typedef struct fi_info *(*dupinfo_fn)(const struct fi_info *);
typedef void (*freeinfo_fn)(struct fi_info *);
typedef int (*fabric_fn)(struct fi_fabric_attr *, struct fid_fabric **, void *);

static __thread int depth;       /* inside libfabric's own compatibility calls */
static char tcp_domain[64];      /* the interface behind every emulated NIC */

static void *real(const char *name, const char *version)
{
    void *library = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlvsym(library, name, version) : NULL;
    if (!symbol) {
        fprintf(stderr, "fake_efa: libfabric has no %s@%s\n", name, version);
        abort();
    }
    return symbol;
}

static int real_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                        const struct fi_info *hints, struct fi_info **info)
{
    getinfo_fn call = (getinfo_fn)real("fi_getinfo", CALLERS_ABI);
    depth++;
    int status = call(version, node, service, flags, hints, info);
    depth--;
    return status;
}

static struct fi_info *real_dupinfo(const struct fi_info *info)
{
    dupinfo_fn call = (dupinfo_fn)real("fi_dupinfo", CALLERS_ABI);
    depth++;
    struct fi_info *copy = call(info);
    depth--;
    return copy;
}

static void real_freeinfo(struct fi_info *info)
{
    freeinfo_fn call = (freeinfo_fn)real("fi_freeinfo", CALLERS_ABI);
    depth++;
    call(info);
    depth--;
}

static void set_string(char **field, const char *text)
{
    free(*field);
    *field = text ? strdup(text) : NULL;
}

static int provider_is(const struct fi_info *info, const char *name)
{
    const char *provider = info->fabric_attr ? info->fabric_attr->prov_name : NULL;
    return provider && !strcmp(provider, name);
}

static int nic_count(void)
{
    const int most = (int)(sizeof NICS / sizeof *NICS);
    const char *wanted = getenv("KVT_FAKE_EFA_NICS");
    int count = wanted ? atoi(wanted) : most;
    return count < 1 ? 1 : count > most ? most : count;
}

/* ---- descriptions ------------------------------------------------------- */

static struct fid_nic *make_nic(const struct nic *nic)
{
    static struct fi_ops no_ops = {.size = sizeof(struct fi_ops)};
    struct fid_nic *made = calloc(1, sizeof *made);
    made->fid.fclass = FI_CLASS_NIC;
    made->fid.ops = &no_ops;
    made->device_attr = calloc(1, sizeof *made->device_attr);
    made->device_attr->name = strdup(nic->name);
    made->bus_attr = calloc(1, sizeof *made->bus_attr);
    made->bus_attr->bus_type = FI_BUS_PCI;
    made->bus_attr->attr.pci.bus_id = nic->bus;
    made->bus_attr->attr.pci.device_id = PCI_DEVICE;
    made->link_attr = calloc(1, sizeof *made->link_attr);
    made->link_attr->speed = LINK_SPEED;
    made->link_attr->state = FI_LINK_UP;
    return made;
}

/* What the caller asks of EFA, asked of TCP. */
static struct fi_info *tcp_hints(const struct fi_info *hints, int *device_memory, char **domain)
{
    struct fi_info *asked = real_dupinfo(hints);
    if (asked->fabric_attr)
        set_string(&asked->fabric_attr->prov_name, "tcp");
    *device_memory = (asked->caps & FI_HMEM) != 0;
    asked->caps &= ~FI_HMEM;
    if (asked->domain_attr) {
        if (asked->domain_attr->name)
            *domain = strdup(asked->domain_attr->name);
        set_string(&asked->domain_attr->name, NULL);
        asked->domain_attr->mr_mode =
            FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
        asked->domain_attr->mr_key_size = 0;
        asked->domain_attr->threading = FI_THREAD_SAFE;
    }
    if (asked->ep_attr && asked->ep_attr->type == FI_EP_UNSPEC)
        asked->ep_attr->type = FI_EP_RDM;
    return asked;
}

/* TCP's answer to stand behind every NIC: IPv4 on a real interface if there is one. */
static const struct fi_info *pick_tcp(const struct fi_info *answers)
{
    const struct fi_info *any = NULL;
    for (const struct fi_info *one = answers; one; one = one->next) {
        if (!provider_is(one, "tcp") || one->ep_attr->type != FI_EP_RDM)
            continue;
        if (one->src_addr && one->addr_format == FI_SOCKADDR_IN)
            return one;
        any = any ? any : one;
    }
    return any;
}

static struct fi_info *dress(const struct fi_info *tcp, const struct nic *nic, int device_memory)
{
    struct fi_info *info = real_dupinfo(tcp);
    info->next = NULL;
    set_string(&info->fabric_attr->prov_name, "efa");
    set_string(&info->domain_attr->name, nic->name);
    info->domain_attr->mr_mode |=
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    if (device_memory) {
        info->caps |= FI_HMEM;
        info->domain_attr->mr_mode |= FI_MR_HMEM;
    }
    info->nic = make_nic(nic);
    return info;
}

int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
               const struct fi_info *hints, struct fi_info **info)
{
    if (depth)
        return ((getinfo_fn)real("fi_getinfo", NEWEST_ABI))(version, node, service, flags, hints,
                                                            info);
    const char *asked_for = hints && hints->fabric_attr ? hints->fabric_attr->prov_name : NULL;
    if (asked_for && strcmp(asked_for, "efa"))
        return real_getinfo(version, node, service, flags, hints, info);

    int device_memory = 0;
    char *domain = NULL;
    struct fi_info *asked = hints ? tcp_hints(hints, &device_memory, &domain) : NULL;
    struct fi_info *answers = NULL;
    int status = real_getinfo(version, node, service, flags, asked, &answers);
    if (asked)
        real_freeinfo(asked);
    if (status) {
        free(domain);
        return status;
    }
    struct fi_info *first = NULL, **tail = &first;
    const struct fi_info *tcp = pick_tcp(answers);
    if (tcp)
        snprintf(tcp_domain, sizeof tcp_domain, "%s", tcp->domain_attr->name);
    for (int i = 0; tcp && i < nic_count(); i++) {
        if (domain && strcmp(domain, NICS[i].name))
            continue;
        *tail = dress(tcp, &NICS[i], device_memory);
        tail = &(*tail)->next;
    }
    real_freeinfo(answers);
    free(domain);
    *info = first;
    return first ? 0 : -FI_ENODATA;
}

struct fi_info *fi_dupinfo(const struct fi_info *info)
{
    if (depth)
        return ((dupinfo_fn)real("fi_dupinfo", NEWEST_ABI))(info);
    if (!info || !info->nic || !provider_is(info, "efa"))
        return real_dupinfo(info);
    /* libfabric would duplicate the NIC through operations that ours lacks. */
    struct fi_info bare = *info;
    bare.nic = NULL;
    struct fi_info *copy = real_dupinfo(&bare);
    copy->nic = info->nic;
    return copy;
}

void fi_freeinfo(struct fi_info *info)
{
    if (depth) {
        ((freeinfo_fn)real("fi_freeinfo", NEWEST_ABI))(info);
        return;
    }
    /* NICs are shared between copies and live as long as the process. */
    for (struct fi_info *one = info; one; one = one->next)
        if (provider_is(one, "efa"))
            one->nic = NULL;
    real_freeinfo(info);
}

/* ---- objects ------------------------------------------------------------ */

/* The description of an emulated NIC, turned back into TCP's own. */
static struct fi_info *undress(const struct fi_info *info)
{
    struct fi_info bare = *info;
    bare.nic = NULL;
    bare.next = NULL;
    struct fi_info *tcp = real_dupinfo(&bare);
    set_string(&tcp->fabric_attr->prov_name, "tcp");
    set_string(&tcp->domain_attr->name, tcp_domain);
    tcp->caps &= ~FI_HMEM;
    tcp->domain_attr->mr_mode &= ~FI_MR_HMEM;
    tcp->domain_attr->caps &= ~FI_HMEM;
    tcp->domain_attr->threading = FI_THREAD_SAFE;
    if (tcp->tx_attr)
        tcp->tx_attr->caps &= ~FI_HMEM;
    if (tcp->rx_attr)
        tcp->rx_attr->caps &= ~FI_HMEM;
    return tcp;
}

/* The function that a patched slot of a table held before. */
struct patch {
    void **slot;
    void *original;
};

static struct patch patches[32];
static int patch_count;

static void patch(void *slot, void *replacement)
{
    void **place = slot;
    if (!*place || *place == replacement)
        return;
    if (patch_count == (int)(sizeof patches / sizeof *patches))
        abort();
    patches[patch_count++] = (struct patch){place, *place};
    *place = replacement;
}

static void *original(void *slot)
{
    for (int i = 0; i < patch_count; i++)
        if (patches[i].slot == slot)
            return patches[i].original;
    abort();
}

/* The caller's structure is changed in place and restored: newer libfabrics have
 * fields behind those that our header knows, and they must arrive too. */
static int register_memory(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags,
                           struct fid_mr **mr)
{
    struct fid_domain *domain = (struct fid_domain *)fid; /* its first member is the fid */
    int (*call)(struct fid *, const struct fi_mr_attr *, uint64_t, struct fid_mr **) =
        original(&domain->mr->regattr);
    struct fi_mr_attr *asked = (struct fi_mr_attr *)attr, before = *attr;
    if (getenv("KVT_FAKE_EFA_TRACE"))
        fprintf(stderr, "fake_efa: register iface=%d bytes=%zu\n", (int)attr->iface,
                attr->mr_iov->iov_len);
    asked->iface = FI_HMEM_SYSTEM;
    memset(&asked->device, 0, sizeof asked->device);
    int status = call(fid, asked, flags, mr);
    asked->iface = before.iface;
    asked->device = before.device;
    return status;
}

static int set_option(struct fid *fid, int level, int option, const void *value, size_t size)
{
    struct fid_ep *ep = (struct fid_ep *)fid;
    int (*call)(struct fid *, int, int, const void *, size_t) = original(&ep->ops->setopt);
    int status = call(fid, level, option, value, size);
    return status == -FI_ENOPROTOOPT ? 0 : status;
}

/* ---- "try again" -------------------------------------------------------- */

static pthread_mutex_t queues_lock = PTHREAD_MUTEX_INITIALIZER;
static struct fid_cq *queues[256];
static int queue_count;

/* Reading nothing from a queue still lets its provider work. */
static void progress_all(void)
{
    pthread_mutex_lock(&queues_lock);
    for (int i = 0; i < queue_count; i++)
        fi_cq_read(queues[i], NULL, 0);
    pthread_mutex_unlock(&queues_lock);
}

static int close_queue(struct fid *fid)
{
    int (*call)(struct fid *) = original(&fid->ops->close);
    pthread_mutex_lock(&queues_lock);
    for (int i = 0; i < queue_count; i++)
        if (&queues[i]->fid == fid) {
            queues[i] = queues[--queue_count];
            break;
        }
    pthread_mutex_unlock(&queues_lock);
    return call(fid);
}

static int open_queue(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **cq,
                      void *context)
{
    int (*call)(struct fid_domain *, struct fi_cq_attr *, struct fid_cq **, void *) =
        original(&domain->ops->cq_open);
    int status = call(domain, attr, cq, context);
    if (status)
        return status;
    patch(&(*cq)->fid.ops->close, close_queue);
    pthread_mutex_lock(&queues_lock);
    if (queue_count < (int)(sizeof queues / sizeof *queues))
        queues[queue_count++] = *cq;
    pthread_mutex_unlock(&queues_lock);
    return 0;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* A caller tries one post again until it ends, so one memory per thread is enough.
 * Once a peer was given up, it gets no second chance until a post to it succeeds.
 */
static ssize_t patient(ssize_t status, const struct fid_ep *ep, fi_addr_t peer)
{
    static __thread const struct fid_ep *waiting_ep;
    static __thread fi_addr_t waiting_peer;
    static __thread double since;
    static __thread int given_up;
    if (status != -FI_EAGAIN) {
        waiting_ep = NULL;
        return status;
    }
    if (waiting_ep != ep || waiting_peer != peer) {
        waiting_ep = ep;
        waiting_peer = peer;
        since = now();
        given_up = 0;
    }
    progress_all();
    if (!given_up && now() - since < PATIENCE)
        return status;
    given_up = 1;
    return -FI_EHOSTUNREACH;
}

static ssize_t read_message(struct fid_ep *ep, const struct fi_msg_rma *message, uint64_t flags)
{
    ssize_t (*call)(struct fid_ep *, const struct fi_msg_rma *, uint64_t) =
        original(&ep->rma->readmsg);
    return patient(call(ep, message, flags), ep, message->addr);
}

static ssize_t write_message(struct fid_ep *ep, const struct fi_msg_rma *message, uint64_t flags)
{
    ssize_t (*call)(struct fid_ep *, const struct fi_msg_rma *, uint64_t) =
        original(&ep->rma->writemsg);
    return patient(call(ep, message, flags), ep, message->addr);
}

static ssize_t send_data(struct fid_ep *ep, const void *buffer, size_t size, void *desc,
                         uint64_t data, fi_addr_t peer, void *context)
{
    ssize_t (*call)(struct fid_ep *, const void *, size_t, void *, uint64_t, fi_addr_t, void *) =
        original(&ep->msg->senddata);
    return patient(call(ep, buffer, size, desc, data, peer, context), ep, peer);
}

/* ---- opening ------------------------------------------------------------ */

static int open_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep,
                         void *context)
{
    int (*call)(struct fid_domain *, struct fi_info *, struct fid_ep **, void *) =
        original(&domain->ops->endpoint);
    struct fi_info *tcp = undress(info);
    int status = call(domain, tcp, ep, context);
    real_freeinfo(tcp);
    if (status)
        return status;
    patch(&(*ep)->ops->setopt, set_option);
    patch(&(*ep)->rma->readmsg, read_message);
    patch(&(*ep)->rma->writemsg, write_message);
    patch(&(*ep)->msg->senddata, send_data);
    return 0;
}

static int open_domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain,
                       void *context)
{
    int (*call)(struct fid_fabric *, struct fi_info *, struct fid_domain **, void *) =
        original(&fabric->ops->domain);
    struct fi_info *tcp = undress(info);
    int status = call(fabric, tcp, domain, context);
    real_freeinfo(tcp);
    if (!status) {
        patch(&(*domain)->ops->endpoint, open_endpoint);
        patch(&(*domain)->ops->cq_open, open_queue);
        patch(&(*domain)->mr->regattr, register_memory);
    }
    return status;
}

int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context)
{
    fabric_fn call = (fabric_fn)real("fi_fabric", "FABRIC_1.1");
    struct fi_fabric_attr asked = *attr;
    int emulated = asked.prov_name && !strcmp(asked.prov_name, "efa");
    if (emulated)
        asked.prov_name = (char *)"tcp";
    int status = call(&asked, fabric, context);
    if (!status && emulated)
        patch(&(*fabric)->ops->domain, open_domain);
    return status;
}
