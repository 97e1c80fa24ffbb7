/* Threads that share the tasks of one phase after another.
 *
 * A thread joins a phase only while it is open, and the caller waits only for those that joined:
 * a thread that the system keeps from running costs its share of the work, not the whole phase.
 * Between phases threads spin for a moment, yield for a while, then sleep. */
#ifndef RF_THREADS_H
#define RF_THREADS_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

enum { RF_SPINS = 2000, RF_YIELDS = 50 };

typedef void (*rf_task)(void *context, int task, int thread);

typedef struct {
    int num_threads;
    pthread_t *threads;
    /* Phase number << 16 | 1 << 15 while open | threads that have joined. */
    _Atomic uint64_t state;
    _Atomic int next_task;
    int num_tasks;
    rf_task run;
    void *context;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    _Atomic int num_sleeping;
    _Atomic bool closing;
    _Atomic int next_thread;
} rf_pool;

static inline void rf_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#define RF_OPEN (UINT64_C(1) << 15)
#define RF_PHASE(state) ((state) >> 16)

static void rf_take_tasks(rf_pool *pool, int thread) {
    int task;
    while ((task = atomic_fetch_add(&pool->next_task, 1)) < pool->num_tasks) pool->run(pool->context, task, thread);
}

/* Wait for another phase than `seen`, or for the end. */
static uint64_t rf_wait_for_phase(rf_pool *pool, uint64_t seen) {
    for (int turn = 0;; turn++) {
        uint64_t state = atomic_load(&pool->state);
        if (RF_PHASE(state) != seen || atomic_load(&pool->closing)) return state;
        if (turn < RF_SPINS) {
            rf_pause();
        } else if (turn < RF_SPINS + RF_YIELDS) {
            sched_yield();
        } else {
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->num_sleeping, 1);
            while (RF_PHASE(atomic_load(&pool->state)) == seen && !atomic_load(&pool->closing))
                pthread_cond_wait(&pool->wake, &pool->mutex);
            atomic_fetch_sub(&pool->num_sleeping, 1);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

static void *rf_thread_main(void *argument) {
    rf_pool *pool = argument;
    const int thread = atomic_fetch_add(&pool->next_thread, 1);
    uint64_t seen = 0;
    for (;;) {
        uint64_t state = rf_wait_for_phase(pool, seen);
        if (atomic_load(&pool->closing)) return NULL;
        seen = RF_PHASE(state);
        while (state & RF_OPEN && RF_PHASE(state) == seen) {
            if (!atomic_compare_exchange_weak(&pool->state, &state, state + 1)) continue;
            rf_take_tasks(pool, thread);
            atomic_fetch_sub(&pool->state, 1);
            break;
        }
    }
}

static void rf_pool_free(rf_pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->closing, true);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int index = 0; index < pool->num_threads - 1; index++) pthread_join(pool->threads[index], NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->wake);
    free(pool->threads);
    free(pool);
}

/* A pool of the caller and num_threads - 1 others; of fewer where the system gives no more. */
static rf_pool *rf_pool_new(int num_threads) {
    rf_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->threads = calloc((size_t)num_threads, sizeof *pool->threads);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    atomic_store(&pool->next_thread, 1);
    pool->num_threads = 1;
    while (pool->threads && pool->num_threads < num_threads) {
        if (pthread_create(&pool->threads[pool->num_threads - 1], NULL, rf_thread_main, pool) != 0) break;
        pool->num_threads++;
    }
    return pool;
}

/* Run tasks 0 to num_tasks - 1 and return when all are done; one caller at a time. */
static void rf_run(rf_pool *pool, int num_tasks, rf_task run, void *context) {
    if (pool->num_threads == 1 || num_tasks < 2) {
        for (int task = 0; task < num_tasks; task++) run(context, task, 0);
        return;
    }
    pool->run = run;
    pool->context = context;
    pool->num_tasks = num_tasks;
    atomic_store(&pool->next_task, 0);
    const uint64_t phase = RF_PHASE(atomic_load(&pool->state)) + 1;
    atomic_store(&pool->state, phase << 16 | RF_OPEN);
    if (atomic_load(&pool->num_sleeping) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
    rf_take_tasks(pool, 0);
    atomic_fetch_and(&pool->state, ~RF_OPEN);
    for (int turn = 0; (atomic_load(&pool->state) & (RF_OPEN - 1)) != 0; turn++) {
        if (turn < RF_SPINS) rf_pause();
        else sched_yield();
    }
}

#endif
