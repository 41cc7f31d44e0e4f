// Old names for glibc's symbols, so that a library built on a new distribution loads on an old one (glibc 2.17 and newer).
//
// A linker binds to the newest version of a symbol that the building machine has: pthread_create became
// pthread_create@GLIBC_2.34 when glibc 2.34 moved threads into libc.so, although the function itself has not changed. The
// directives below ask for the version that every glibc has. They are no-ops in files that don't use the symbol.
//
// Include this in every file that calls one of them. Functions that are newer than 2.17 altogether (memfd_create, gettid,
// getrandom, pidfd_open, statx, ...) are called through syscall(2). .ci/check-library names what was forgotten.
#pragma once

// Sanitizers replace these functions by name, and a version would get in their way.
#if defined(__linux__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define A2A_SANITIZED 1
#endif
#endif

#if !defined(A2A_SANITIZED)
#if defined(__x86_64__)
#define A2A_GLIBC_SYMBOL(name, x86_version) __asm__(".symver " #name ", " #name "@GLIBC_" #x86_version)
#elif defined(__aarch64__)  // its first glibc was 2.17
#define A2A_GLIBC_SYMBOL(name, x86_version) __asm__(".symver " #name ", " #name "@GLIBC_2.17")
#endif
#endif
#endif

#if defined(A2A_GLIBC_SYMBOL)
A2A_GLIBC_SYMBOL(dladdr, 2.2.5);
A2A_GLIBC_SYMBOL(dlclose, 2.2.5);
A2A_GLIBC_SYMBOL(dlerror, 2.2.5);
A2A_GLIBC_SYMBOL(dlopen, 2.2.5);
A2A_GLIBC_SYMBOL(dlsym, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_attr_setstacksize, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_condattr_setclock, 2.3.3);
A2A_GLIBC_SYMBOL(pthread_create, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_detach, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_getspecific, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_join, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_key_create, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_key_delete, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_kill, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_mutex_trylock, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_mutexattr_init, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_mutexattr_settype, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_once, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_setname_np, 2.12);
A2A_GLIBC_SYMBOL(pthread_setspecific, 2.2.5);
A2A_GLIBC_SYMBOL(pthread_sigmask, 2.2.5);
A2A_GLIBC_SYMBOL(sem_destroy, 2.2.5);
A2A_GLIBC_SYMBOL(sem_init, 2.2.5);
A2A_GLIBC_SYMBOL(sem_post, 2.2.5);
A2A_GLIBC_SYMBOL(sem_timedwait, 2.2.5);
A2A_GLIBC_SYMBOL(sem_wait, 2.2.5);
#undef A2A_GLIBC_SYMBOL
#endif
