# The machine code of fork_batch.py: forks several jobs in a row; each child then takes its job's steps.
# `make machine-code` assembles this file and prints the bytes for _MACHINE_CODE.
#
#   size_t run(long **jobs, size_t count)      System V calling convention of x86-64
#
# Returns, in the parent, the address behind the last element of `jobs`; in a child, the address of its own element.
# A job, in words of 8 bytes:
#   0      result: the child's process id or a negative error; in a child, the error of the step that failed
#   1..4   input copy: source, target, bytes, zero bytes behind them;
#          in a child whose step failed, word 1 becomes the address of that step
#   5..    steps of 7 words: number of the system call, six arguments; -1 in place of a number ends them
# The first step reads the clock, the second forks. All others are taken by the child until one fails.

        .intel_syntax noprefix
        .text
run:    push    rbx                     # address of the job
        push    rbp                     # address of the step
        push    r12                     # address of the job's element in `jobs`
        push    r13                     # address behind the last element of `jobs`
        mov     r12, rdi
        lea     r13, [rdi + rsi*8]

next:   cmp     r12, r13
        je      out
        mov     rbx, [r12]
        mov     rsi, [rbx + 8]          # copy the input to where the child expects it
        mov     rdi, [rbx + 16]
        mov     rcx, [rbx + 24]
        rep movsb
        mov     rcx, [rbx + 32]
        xor     eax, eax
        rep stosb                       # write zero bytes behind it
        lea     rbp, [rbx - 16]         # one step before the first one
        call    step                    # clock_gettime
        call    step                    # clone or clone3
        test    rax, rax
        je      child
        mov     [rbx], rax
        add     r12, 8
        jmp     next

child:  cmp     qword ptr [rbp + 56], -1
        je      out
        call    step
        test    rax, rax
        jns     child
        mov     [rbx], rax
        mov     [rbx + 8], rbp

out:    mov     rax, r12
        pop     r13
        pop     r12
        pop     rbp
        pop     rbx
        ret

step:   add     rbp, 56                 # advance to the next step and make its system call
        mov     rax, [rbp]
        mov     rdi, [rbp + 8]
        mov     rsi, [rbp + 16]
        mov     rdx, [rbp + 24]
        mov     r10, [rbp + 32]
        mov     r8, [rbp + 40]
        mov     r9, [rbp + 48]
        syscall
        ret
