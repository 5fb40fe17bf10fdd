# The machine code of fork_batch.py for x86_64: forks the template, a process that forks jobs and never runs Python.
# `make machine-code` assembles this file and prints the bytes for _MACHINE_CODE.
#
#   long start(long *memory)      System V calling convention of x86-64
#
# Returns, in the zygote, the process id of the template or a negative error; in each call that the template forks, 0.
# A step is a system call in 7 words of 8 bytes: its number and six arguments. `memory`, by word:
#   0      the step that forks the template
#   7..    steps of the template; -1 in place of a number ends them
#   22     the step that reads the number of jobs (8 bytes) into word 29
#   30     the step that tells the zygote that the jobs are forked
#   37     address of the private copy of a job
#   40..   the jobs, of 320 words each
# A job, by word:
#   0      result: the child's process id or a negative error
#   1..4   copy of the record: source, target, bytes, zero bytes behind them
#   6..    steps; the first reads the clock, the second forks, the child takes the others until one fails; then -1
# The template takes the steps of the private copy. In a child whose step failed, word 0 of the copy is the error, and
# word 1 is the address of the step.

        .intel_syntax noprefix
        .text
        .set    STEP, 56                # bytes of a step
        .set    READ, 22 * 8
        .set    COUNT, 29 * 8
        .set    WRITE, 30 * 8
        .set    COPY, 37 * 8
        .set    JOBS, 40 * 8
        .set    JOB_WORDS, 320
        .set    FIRST_STEP, 6 * 8

start:  push    rbx                     # address of the job
        push    rbp                     # address of the last step
        push    r12                     # address of the memory
        push    r13                     # number of jobs that are left
        push    r14                     # address of the private copy
        mov     r12, rdi
        mov     r14, [r12 + COPY]
        lea     rbp, [r12 - STEP]
        call    step                    # fork the template
        test    rax, rax
        jne     out                     # in the zygote

setup:  cmp     qword ptr [rbp + STEP], -1
        je      serve
        call    step
        test    rax, rax
        jns     setup
exit:   mov     edi, 1
        mov     eax, 231                # exit_group
        syscall

serve:  lea     rbp, [r12 + READ - STEP]
        call    step
        cmp     rax, 8
        jne     exit
        mov     r13, [r12 + COUNT]
        lea     rbx, [r12 + JOBS]

next:   mov     rsi, rbx                # copy the job, so that the child needs no memory of the zygote
        mov     rdi, r14
        mov     ecx, JOB_WORDS
        rep movsq
        mov     rsi, [rbx + 8]          # copy the record to where the child expects it
        mov     rdi, [rbx + 16]
        mov     rcx, [rbx + 24]
        rep movsb
        mov     rcx, [rbx + 32]
        xor     eax, eax
        rep stosb                       # write zero bytes behind it
        lea     rbp, [r14 + FIRST_STEP - STEP]
        call    step                    # clock_gettime
        call    step                    # clone or clone3
        test    rax, rax
        je      child
        mov     [rbx], rax
        add     rbx, JOB_WORDS * 8
        dec     r13
        jne     next
        lea     rbp, [r12 + WRITE - STEP]
        call    step
        jmp     serve

child:  cmp     qword ptr [rbp + STEP], -1
        je      done
        call    step
        test    rax, rax
        jns     child
        mov     [r14], rax
        mov     [r14 + 8], rbp
done:   xor     eax, eax
out:    pop     r14
        pop     r13
        pop     r12
        pop     rbp
        pop     rbx
        ret

step:   add     rbp, STEP               # advance to the next step and make its system call
        mov     rax, [rbp]
        mov     rdi, [rbp + 8]
        mov     rsi, [rbp + 16]
        mov     rdx, [rbp + 24]
        mov     r10, [rbp + 32]
        mov     r8, [rbp + 40]
        mov     r9, [rbp + 48]
        syscall
        ret
