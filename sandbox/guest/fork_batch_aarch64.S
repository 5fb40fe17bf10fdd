# The machine code of fork_batch.py for aarch64. It does the same as fork_batch_x86_64.S, which documents the layout of the
# memory. `make machine-code MACHINE=aarch64` assembles this file.
#
#   long start(long *memory)      procedure call standard of aarch64

        .text
        .set    STEP, 56                // bytes of a step
        .set    READ, 22 * 8
        .set    COUNT, 29 * 8
        .set    WRITE, 30 * 8
        .set    COPY, 37 * 8
        .set    JOBS, 40 * 8
        .set    JOB_BYTES, 320 * 8
        .set    FIRST_STEP, 6 * 8

start:  stp     x29, x30, [sp, -64]!
        stp     x19, x20, [sp, 16]      // address of the job, address of the last step
        stp     x21, x22, [sp, 32]      // address of the memory, number of jobs that are left
        str     x23, [sp, 48]           // address of the private copy
        mov     x21, x0
        ldr     x23, [x21, COPY]
        sub     x20, x21, STEP
        bl      step                    // fork the template
        cbnz    x0, out                 // in the zygote

setup:  ldr     x9, [x20, STEP]
        cmn     x9, 1
        b.eq    serve
        bl      step
        tbz     x0, 63, setup           // the result is not negative
exit:   mov     x0, 1
        mov     x8, 94                  // exit_group
        svc     0

serve:  add     x20, x21, READ - STEP
        bl      step
        cmp     x0, 8
        b.ne    exit
        ldr     x22, [x21, COUNT]
        add     x19, x21, JOBS

next:   mov     x9, x19                 // copy the job, so that the child needs no memory of the zygote
        mov     x10, x23
        mov     x11, JOB_BYTES
        bl      copy
        ldp     x9, x10, [x19, 8]       // copy the record to where the child expects it
        ldp     x11, x12, [x19, 24]
        bl      copy
        cbz     x12, fork
wipe:   strb    wzr, [x10], 1           // write zero bytes behind it
        subs    x12, x12, 1
        b.ne    wipe
fork:   add     x20, x23, FIRST_STEP - STEP
        bl      step                    // clock_gettime
        bl      step                    // clone or clone3
        cbz     x0, child
        str     x0, [x19]
        add     x19, x19, JOB_BYTES
        subs    x22, x22, 1
        b.ne    next
        add     x20, x21, WRITE - STEP
        bl      step
        b       serve

child:  ldr     x9, [x20, STEP]
        cmn     x9, 1
        b.eq    done
        bl      step
        tbz     x0, 63, child
        stp     x0, x20, [x23]
done:   mov     x0, 0
out:    ldr     x23, [sp, 48]
        ldp     x21, x22, [sp, 32]
        ldp     x19, x20, [sp, 16]
        ldp     x29, x30, [sp], 64
        ret

step:   add     x20, x20, STEP          // advance to the next step and make its system call
        ldr     x8, [x20]
        ldp     x0, x1, [x20, 8]
        ldp     x2, x3, [x20, 24]
        ldp     x4, x5, [x20, 40]
        svc     0
        ret

copy:   subs    x11, x11, 8             // copy x11 bytes from x9 to x10; afterwards x10 is the end of the target
        b.lo    rest
        ldr     x13, [x9], 8
        str     x13, [x10], 8
        b       copy
rest:   adds    x11, x11, 8
        b.eq    copied
byte:   ldrb    w13, [x9], 1
        strb    w13, [x10], 1
        subs    x11, x11, 1
        b.ne    byte
copied: ret
