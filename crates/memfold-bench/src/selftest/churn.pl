# Writes and checks files whose every page says what it must be, for as long as it is told: pages of a guest that are
# folded, written, truncated, dropped and read anew, all at the same time. The two guests write the same first contents, so
# that their pages can be folded onto each other. Prints: writes checks errors.
use strict;
use warnings;
use Fcntl;
my ($directory, $seconds, $seed) = @ARGV;
my ($files, $pages) = (24, 256);
srand($seed);

sub body {
    my ($file, $page, $generation) = @_;
    my $text = sprintf("memfold %06d %06d %08d ", $file, $page, $generation);
    return substr($text x 133, 0, 4096);
}

mkdir $directory;
my (@generation, @handle);
for my $file (0 .. $files - 1) {
    sysopen($handle[$file], "$directory/$file", O_RDWR | O_CREAT | O_TRUNC) or die "$directory/$file: $!";
    for my $page (0 .. $pages - 1) {
        $generation[$file][$page] = 0;
        syswrite($handle[$file], body($file, $page, 0)) == 4096 or die "write: $!";
    }
}
system("sync");

my ($writes, $checks, $errors) = (0, 0, 0);
sub put {
    my ($file, $page) = @_;
    sysseek($handle[$file], $page * 4096, 0);
    syswrite($handle[$file], body($file, $page, $generation[$file][$page])) == 4096 or die "write: $!";
    $writes++;
}
sub look {
    my ($file, $page) = @_;
    sysseek($handle[$file], $page * 4096, 0);
    my $got = sysread($handle[$file], my $bytes, 4096);
    $checks++;
    $errors++ unless defined $got && $got == 4096 && $bytes eq body($file, $page, $generation[$file][$page]);
}

my $end = time + $seconds;
my $dropped = time;
while (time < $end) {
    my $file = int rand $files;
    my $first = int rand $pages;
    my $last = $first + int rand 8;
    $last = $pages - 1 if $last >= $pages;
    # Most pages are left alone: what is written all the time can't be folded.
    if ($file < 4) {
        for my $page ($first .. $last) {
            $generation[$file][$page]++;
            put($file, $page);
        }
    } elsif ($file == 4) {
        truncate $handle[$file], $first * 4096;
        put($file, $_) for $first .. $pages - 1;
    }
    look($file, $_) for $first .. $last;
    # Page frames find other uses, and files other frames.
    if (time - $dropped >= 10) {
        $dropped = time;
        system("sync; echo 1 > /proc/sys/vm/drop_caches");
    }
    select undef, undef, undef, 0.002;
}
for my $file (0 .. $files - 1) {
    look($file, $_) for 0 .. $pages - 1;
}
print "$writes $checks $errors\n";
