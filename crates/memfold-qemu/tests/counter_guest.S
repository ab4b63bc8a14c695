# A guest that QEMU starts in place of a firmware. (Under an emulated KVM, the firmware alone takes
# ten seconds.) The guest counts in the first word of 64 pages from 0x20000, in random order, and
# keeps the same counts in a table at 0x1000.
#   as --32 -o g.o counter_guest.S && ld -m elf_i386 -Ttext 0 --oformat binary -o g g.o
.code16
.globl _start
_start:
  cli
  xor %ax, %ax
  mov %ax, %ds
  mov %ax, %ss
  mov $0x7000, %sp
  mov $12345, %cx
  mov $0x1000, %di          # the table of 64 words
1: movw $0, (%di)
  add $2, %di
  cmp $0x1080, %di
  jne 1b
  xor %bx, %bx              # the counter in each page
2: mov %bx, %ax
  shl $8, %ax
  add $0x2000, %ax
  mov %ax, %es
  movw $0, %es:0
  inc %bx
  cmp $64, %bx
  jne 2b
  movw $0x4d46, 0x1100      # "FM": running
3: mov %cx, %ax             # linear congruential generator
  mov $25173, %dx
  mul %dx
  add $13849, %ax
  mov %ax, %cx
  shr $7, %ax
  and $63, %ax
  mov %ax, %bx
  shl $8, %ax
  add $0x2000, %ax
  mov %ax, %es
  incw %es:0
  shl $1, %bx
  incw 0x1000(%bx)
  jmp 3b
.org 0xfff0
  ljmp $0xf000, $_start     # the first instruction after a reset
.org 0x10000
